"""profile: what every layer of a model takes, forward and backward, measured in the
model's own steps.

Source: US-Byte, section 5.1: hooks at every tensor, a device synchronisation at each,
    the interval between two synchronisations, averaged over 50 measurements.
Differences from the paper: the median and not the mean, as other work on the machine
    only ever adds time. Forward times come from the same steps, not from a copy of the
    model's code. Every moment of a step is charged to some layer (``LayerEvents`` says
    to which), and layers' medians are scaled to the median of steps without hooks that
    ran in turn with those with hooks: they add up to what the step really takes, and
    the hooks' own time is not in them.
"""

from __future__ import annotations

import datetime
import platform
import random
import statistics
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from time import perf_counter as clock
from time import thread_time
from typing import Any, NamedTuple, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..contract.bounds import check_whole
from ..errors import InvalidSetting, invalid
from ..planning.data.profile import GradientDType, Layer, Profile, ProfiledTensor
from ..runtime.grid.reals import as_reals
from ..runtime.step.hooked import Hooked, is_in_backward

# ---- Events --------------------------------------------------------------------------
#
# An event ends a stretch of time. In the forward pass a layer's events are where it is
# entered, so what runs between two layers (activations, residual sums, the loss) is
# charged to the earlier one: it waits for no other parameters. In the backward pass a
# layer's events are where a gradient of it is ready, so what runs between two layers is
# charged to the later one, which waits for it. Both ways nothing is lost and nothing
# counts twice.

BEGUN = "begun"
ENTERED = "entered"
LEFT = "left"
READY = "ready"
ENDED = "ended"
"""A step, a module's forward, a forward's end, a gradient, a backward pass's end."""


class LayerEvent(NamedTuple):
    """An event: its kind, its module or the name of its gradient, and when it was."""

    kind: str
    what: Any
    at_s: float


class LayerEvents:
    """The events of a model's steps, by hooks in ``modules`` and at ``params``.

    Each waits until the device has done what was asked of it.
    """

    def __init__(
        self, model: nn.Module, modules: Iterable[nn.Module], params: Mapping[str, Any]
    ) -> None:
        self._model = model
        self._params = dict(params)
        self._wait = device_waiter({param.device for param in model.parameters()})
        self.events: list[LayerEvent] = []
        self.batch_size: int | None = None
        self._undo = ExitStack()
        for module in modules:
            hook = Hooked(
                module.register_forward_pre_hook, self._enter, with_kwargs=True
            )
            self._undo.callback(hook.remove)
        for name, param in self._params.items():
            self._undo.callback(self._watch(name, param).remove)

    def remove(self) -> None:
        """Removes all hooks."""
        self._undo.close()

    def note(self, kind: str, what: Any = None) -> None:
        """Records an event."""
        self._wait()
        self.events.append(LayerEvent(kind, what, clock()))

    def run(self, step: Callable[[], object]) -> list[LayerEvent]:
        """The events of one step, with those of its backward passes."""
        self.events = []
        self.note(BEGUN)
        with self._watched_backward():
            step()
        self.note(LEFT)
        return self.events

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if is_in_backward():
            return
        if module is self._model and self.batch_size is None:
            arguments = (*args, *kwargs.values())
            sizes = (
                len(value)
                for value in arguments
                if isinstance(value, Tensor) and value.dim()
            )
            self.batch_size = next(sizes, None)
        self.note(ENTERED, module)

    def _watch(self, name: str, param: Any) -> Any:
        # the garbage collector does not see what a parameter's hooks hold
        this = weakref.ref(self)

        def ready(param: Tensor) -> None:
            events = this()
            if events is not None:
                events.note(READY, name)

        hook = param.register_post_accumulate_grad_hook(ready)
        # First: behind the exchange's hook it would keep the gradient from being lent.
        param._post_accumulate_grad_hooks.move_to_end(hook.id, last=False)
        return hook

    @contextmanager
    def _watched_backward(self) -> Iterator[None]:
        """Records where backward passes begin and end.

        ``loss.backward()`` looks ``torch.autograd.backward`` up at each call. No hook
        fires before the first gradient is computed, so there is no other place that
        knows when the loss is.
        """
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            if is_in_backward():  # as reentrant checkpoints call it
                return original(*args, **kwargs)
            self.note(LEFT)
            try:
                original(*args, **kwargs)
            finally:
                self.note(ENDED)

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = original


class LayerSeconds(NamedTuple):
    """Seconds of each layer in one step."""

    forward_s: list[float]
    backward_s: list[float]


def charged(events: Sequence[LayerEvent], seen: ObservedModel) -> LayerSeconds:
    """Seconds of a step's layers, from its first event on."""
    place = {module: number for number, (_, module) in enumerate(seen.layers)}
    forward_s = [0.0] * max(1, len(place))
    backward_s = list(forward_s)
    first, *others = events
    at = place.get(first.what, 0)
    last = 0
    last_s = first.at_s
    for kind, what, now_s in others:
        if kind == ENTERED and what not in place:
            continue
        if kind in (ENTERED, LEFT):
            forward_s[at] += now_s - last_s
            at = place.get(what, at)
        else:
            last = seen.parameters[what][1] if kind == READY else last
            backward_s[last] += now_s - last_s
            # what a step does then, the next forward waits for
            at = 0 if kind == ENDED else at
        last_s = now_s
    return LayerSeconds(forward_s, backward_s)


# ---- untouched -----------------------------------------------------------------------
#
# Runs steps of somebody's model and leaves everything about it as it was.


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Gives back gradients, buffers, training modes and random numbers at the end.

    Gradients are set aside at its beginning, as the same tensors. Parameters are not
    copied: nothing in the block may change them.
    """
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    states = random.getstate(), np.random.get_state()
    for parameter, _ in grads:
        parameter.grad = None
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for parameter, grad in grads:
            parameter.grad = grad
        for module, mode in modes:
            module.training = mode
        for module, name, buffer, content in buffers:
            module._buffers[name] = buffer
            if buffer is not None and content is not None:
                with torch.no_grad():
                    buffer.copy_(content)


# ---- layers --------------------------------------------------------------------------


def no_progress(amount: float = 1, note: str = "") -> None:
    """Does nothing with progress, for callers that give no ``advance``."""


TrainingStep = Callable[[], object]
"""Runs one forward and backward of the model on one batch.

What it returns is not looked at.
"""

NUM_WARM_UP = 3
ITERATIONS = {"cpu": 20, "cuda": 50}
"""Steps measured where the caller names no number, by device type.

50 is the paper's.
"""


def profile(
    model: nn.Module,
    step: TrainingStep,
    *,
    iterations: int | None = None,
    batch_size: int | None = None,
    name: str | None = None,
    advance: Callable[..., None] = no_progress,
) -> Profile:
    """Measures the seconds of a model's layers, forward and backward.

    It runs ``iterations`` steps with hooks and as many without. The model is left as it
    was: hooks, gradients, buffers, training modes and random numbers are restored. A
    layer is a module that owns parameters, in the order of first calls. For a DDP model
    communication counts as backward, unless ``step`` runs under ``no_sync``.

    Args:
        model: The model.
        step: A function that runs one forward and backward pass on one batch, and no
            optimizer.
        iterations: Steps to measure. The default depends on the device.
        batch_size: The default is read off the model's first tensor argument.
        name: The model's name in the profile. The default is its class.
        advance: A function that is called after each step as ``advance(amount, note)``.
            Default: nothing is called.

    Returns:
        The profile.

    Raises:
        InvalidSetting: A step changes a parameter, or runs no backward pass of this
            model, or a parameter gets no gradient.

    >>> model = nn.Linear(4, 2)
    >>> def step():
    ...     model(torch.ones(3, 4)).sum().backward()
    >>> measured = profile(model, step, iterations=1)
    >>> len(measured.layers), measured.batch_size
    (1, 3)
    """
    model = looked_into(model)
    watched = {key: p for key, p in model.named_parameters() if p.requires_grad}
    if not watched:
        raise invalid(
            "model", type(model).__name__, "one with trainable parameters", "unfreeze"
        )
    devices = {parameter.device for parameter in watched.values()}
    default = ITERATIONS[
        "cuda" if any(device.type == "cuda" for device in devices) else "cpu"
    ]
    if iterations is not None:
        check_whole("iterations", iterations, f"{default} is the default")
    if batch_size is not None:
        check_whole("batch_size", batch_size, "leave it out to read it off the model")
    iterations = iterations or default
    with untouched(model):
        seen = _observe(model, watched, step)
        if batch_size is None and seen.batch_size is None:
            raise invalid(
                "batch_size", None, "given", "no tensor is passed to the model itself"
            )
        layers = _measure(model, seen, step, iterations, advance)
    return Profile(
        model=name or type(model).__name__,
        source=_source(devices, iterations),
        batch_size=batch_size or seen.batch_size or 1,
        layers=layers,
    )


def device_waiter(devices: set[torch.device]) -> Callable[[], None]:
    """A function that waits until all GPUs have done what was asked.

    A CPU has done it already.
    """
    on_gpu = [device for device in devices if device.type == "cuda"]

    def synchronise() -> None:
        for device in on_gpu:
            torch.cuda.synchronize(device)

    return synchronise


def looked_into(model: nn.Module) -> nn.Module:
    """The module itself, without DDP around it; refuses a compiled one."""
    if hasattr(model, "_orig_mod"):
        raise invalid(
            "model",
            "a compiled one",
            "one before torch.compile",
            "profile it before it is compiled",
        )
    return model.module if isinstance(model, DistributedDataParallel) else model


@dataclass(frozen=True)
class ObservedModel:
    """A model as one step showed it: its layers, in the order of first calls."""

    layers: list[tuple[str, nn.Module]]
    """Names and modules; a layer begins where its module is entered."""
    parameters: dict[str, tuple[Tensor, int]]
    """Every trainable parameter by name, and the number of its layer."""
    batch_size: int | None


def _observe(
    model: nn.Module, watched: dict[str, nn.Parameter], step: TrainingStep
) -> ObservedModel:
    """Runs a step and notes called modules and parameters with gradients."""
    # a parameter's version grows whenever its values are written in place
    before = {key: parameter._version for key, parameter in model.named_parameters()}
    events = LayerEvents(model, model.modules(), watched)
    try:
        noted = events.run(step)
    finally:
        events.remove()
    changed = [
        key
        for key, parameter in model.named_parameters()
        if parameter._version != before[key]
    ]
    if changed:
        raise _wrong_step(
            f"changed {_listed(changed)}", "leave the optimizer out of it"
        )
    called = [event.what for event in noted if event.kind == ENTERED]
    if not called:
        raise _wrong_step(
            "called no module of this model", "let it run the model given here"
        )
    if not any(event.kind == ENDED for event in noted):
        raise _wrong_step("ran no backward", "let it call loss.backward()")
    without = sorted(
        watched.keys() - {event.what for event in noted if event.kind == READY}
    )
    if without:
        raise _wrong_step(
            f"gave no gradient to {_listed(without)}",
            "set requires_grad to False where none is wanted, or profile a step "
            "that uses them",
        )
    return in_order(model, watched, called, events.batch_size)


def _wrong_step(what: str, remedy: str) -> InvalidSetting:
    return InvalidSetting(
        "step must run one forward and one backward of the model and nothing else; it "
        f"{what}; {remedy}"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )


def in_order(
    model: nn.Module,
    watched: Mapping[str, Any],
    called: list[nn.Module],
    batch_size: int | None,
) -> ObservedModel:
    """Gives every parameter to a module of ``called``, in the order of first calls.

    A model that is only called in parts is entered when its step begins.
    """
    called = [*dict.fromkeys(called if model in called else [model, *called])]
    place = {module: i for i, module in enumerate(called)}
    names = {module: name for name, module in model.named_modules()}
    holders: dict[Tensor, int] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                at = place[_nearest(model, name, place)]
                holders[parameter] = min(at, holders.get(parameter, at))
    kept = sorted({holders[parameter] for parameter in watched.values()})
    number = {at: i for i, at in enumerate(kept)}
    return ObservedModel(
        layers=[(names[called[at]] or type(model).__name__, called[at]) for at in kept],
        parameters={key: (p, number[holders[p]]) for key, p in watched.items()},
        batch_size=batch_size,
    )


def _nearest(model: nn.Module, name: str, called: Container[nn.Module]) -> nn.Module:
    """The module of that name or, if not called, the nearest called one above it."""
    while name and model.get_submodule(name) not in called:
        name = name.rpartition(".")[0]
    return model.get_submodule(name)


def _measure(
    model: nn.Module,
    seen: ObservedModel,
    step: TrainingStep,
    iterations: int,
    advance: Callable[..., None],
) -> tuple[Layer, ...]:
    """The layers with their seconds, by steps without and with hooks in turn.

    So a busy machine slows both.
    """
    params = {name: parameter for name, (parameter, _) in seen.parameters.items()}
    modules = [module for _, module in seen.layers]
    plain: list[LayerSeconds] = []
    marked: list[LayerSeconds] = []
    for number in range(-NUM_WARM_UP, iterations):
        for hooked, steps in ((), plain), (modules, marked):
            for parameter in params.values():
                parameter.grad = None
            events = LayerEvents(model, hooked, params if hooked else {})
            try:
                noted = events.run(step)
            finally:
                events.remove()
            if number >= 0:
                steps.append(charged(noted, seen))
        is_measured = number >= 0
        note = f"step {number + 1} of {iterations}" if is_measured else "warming up"
        advance(1, note)
    return layers_of(seen, marked, plain)


def layers_of(
    seen: ObservedModel, steps: Sequence[LayerSeconds], plain: Sequence[LayerSeconds]
) -> tuple[Layer, ...]:
    """The layers of a profile: medians over ``steps``, scaled to those of ``plain``."""
    forward_s = _scaled_medians(
        [step.forward_s for step in steps], [step.forward_s for step in plain]
    )
    backward_s = _scaled_medians(
        [step.backward_s for step in steps], [step.backward_s for step in plain]
    )
    tensors: list[list[ProfiledTensor]] = [[] for _ in seen.layers]
    for key, (parameter, number) in seen.parameters.items():
        tensors[number].append(_tensor(key, parameter))
    return tuple(
        Layer(
            name=name,
            tensors=tuple(tensors[number]),
            forward_s=forward_s[number],
            backward_s=backward_s[number],
        )
        for number, (name, _) in enumerate(seen.layers)
    )


def _scaled_medians(
    by_step: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]
) -> list[float]:
    """Each layer's median, scaled so that all add up to the plain steps' median."""
    medians_s = [statistics.median(layer) for layer in zip(*by_step, strict=True)]
    total_s = sum(medians_s)
    factor = statistics.median(map(sum, plain)) / total_s if total_s else 0.0
    return [seconds * factor for seconds in medians_s]


def _tensor(name: str, parameter: Tensor) -> ProfiledTensor:
    reals = as_reals(parameter)  # which is what travels
    dtype = str(reals.dtype).removeprefix("torch.")
    if dtype not in get_args(GradientDType):
        raise invalid(
            f"dtype of parameter {name!r}",
            dtype,
            f"one of {', '.join(get_args(GradientDType))}",
            "cast it",
        )
    return ProfiledTensor(
        name=name, shape=tuple(reals.shape), dtype=cast(GradientDType, dtype)
    )


def today() -> str:
    """The date by which figures say when they were measured."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _source(devices: set[torch.device], iterations: int) -> str:
    named = sorted(
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"
        for device in devices
    )
    return (
        f"measured on {', '.join(named)}, {today()}, torch {torch.__version__}: "
        f"medians of {iterations} steps, scaled to those of steps without hooks"
    )


# ---- LayerWatch ----------------------------------------------------------------------
#
# What every layer takes, measured in the steps of a training itself, which it neither
# runs nor changes. Every moment of a step, from its first layer's entry to the last
# gradient, is charged to some layer. No hook tells where the backward pass begins: what
# lies between the end of the model's forward and the first gradient, the loss with it,
# counts as backward of that gradient's layer. Under DDP gradients are ready when their
# whole bucket is, and all seconds of a bucket are those of its first gradient.


class _Step(NamedTuple):
    """The events of one step, and the seconds from the end of the step before it."""

    other_s: float
    events: list[LayerEvent]


class LayerWatch(LayerEvents):
    """Hooks in a living model.

    ``step_ended`` closes a step, ``profile`` tells what they took.

    ``params`` are the parameters whose gradients count, by name. Several backward
    passes may accumulate before an exchange. The last one counts, and the earlier ones
    are in ``other_s``. Under DDP ``model`` is the module inside, and the buckets of
    ``ddp`` tell when gradients are ready.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[str, Tensor],
        ddp: DistributedDataParallel | None = None,
    ) -> None:
        # Hooks inside of a compiled model would cut its graph: it is one layer.
        super().__init__(
            model, [model] if hasattr(model, "_orig_mod") else model.modules(), params
        )
        self._undo.callback(Hooked(model.register_forward_hook, self._leave).remove)
        self._steps: list[_Step] = []
        self.seconds: list[tuple[float, float]] = []
        """Two figures of each step: its seconds up to the last gradient, and those of
        them in which a core worked for its thread. (0, 0) for a step that was not seen
        as a whole.
        """
        self._last_s: float | None = None
        self._ddp = ddp
        self._began = self._ended = (0, 0.0)

    @property
    def num_steps(self) -> int:
        """The steps that were seen as a whole."""
        return len(self._steps)

    @property
    def other_s(self) -> float:
        """Seconds of a step in which neither layers nor the exchange are at work: the
        optimizer, the next batch.
        """
        return statistics.median(step.other_s for step in self._steps)

    def step_ended(self) -> None:
        """Closes a step whose means have arrived."""
        if self._last_s is not None:
            self.seconds.append((0.0, 0.0))
        kinds = [event.kind for event in self.events]
        if self._last_s is not None and kinds[:1] == [ENTERED] and kinds[-1] == READY:
            first_s = self.events[0].at_s
            ready_s = self.events[-1].at_s
            other_s = first_s - self._last_s
            (thread, before_s) = self._began
            (last_thread, after_s) = self._ended
            core_s = after_s - before_s if thread == last_thread else inf
            self._steps.append(_Step(other_s, self.events))
            self.seconds[-1] = (other_s + ready_s - first_s, other_s + core_s)
        self.events = []
        self._last_s = clock()

    def profile(self) -> Profile:
        """The profile of the steps so far; there is at least one."""
        first = self._steps[0].events
        buckets = self._buckets()
        called = [event.what for event in first if event.kind == ENTERED]
        seen = in_order(self._model, self._params, called, self.batch_size)
        steps = [
            charged(_in_buckets(step.events, buckets), seen) for step in self._steps
        ]
        return Profile(
            model=type(self._model).__name__,
            source=f"measured in {len(steps)} dense steps of the training itself, "
            f"{today()}",
            batch_size=self.batch_size or 1,
            layers=layers_of(seen, steps, steps),
        )

    def _buckets(self) -> list[list[str]]:
        """The names of parameters that DDP has ready together, in the buckets' order.

        Without DDP there are none.
        """
        if self._ddp is None:
            return []
        names = {id(param): name for name, param in self._params.items()}
        # as DDP itself asks for them
        buckets = self._ddp.reducer._get_zeros_like_grad_buckets()
        return [
            [names[id(p)] for p in bucket.parameters() if id(p) in names]
            for bucket in buckets
        ]

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not torch.is_grad_enabled() or is_in_backward():
            return
        # of a backward pass that accumulated
        if self.events and self.events[-1].kind == READY:
            self.events = []
        if not self.events:
            self._began = threading.get_ident(), thread_time()
        super()._enter(module, args, kwargs)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.events and self.events[-1].kind != READY and not is_in_backward():
            self.note(LEFT)

    def note(self, kind: str, what: Any = None) -> None:
        super().note(kind, what)
        if kind == READY:
            self._ended = threading.get_ident(), thread_time()


def _in_buckets(
    events: Sequence[LayerEvent], buckets: Sequence[Sequence[str]]
) -> list[LayerEvent]:
    """Events with gradients as DDP has them: with the last of their bucket.

    A bucket is ready after all buckets before it. First ones without any gradient take
    no time.

    >>> ready = [LayerEvent(READY, *e) for e in [("c", 1.0), ("a", 2.0), ("b", 3.0)]]
    >>> [event[1:] for event in _in_buckets(ready, [["c", "b"], ["a"]])]
    [('c', 3.0), ('b', 3.0), ('a', 3.0)]
    >>> ready = [LayerEvent(READY, "a", 5.0)]
    >>> [event[1:] for event in _in_buckets(ready, [["unused"], ["a"]])]
    [('unused', 5.0), ('a', 5.0)]
    """
    if not buckets:
        return list(events)
    bucketed = [event for event in events if event.kind != READY]
    at_s = {event.what: event.at_s for event in events if event.kind == READY}
    now_s = min(at_s.values(), default=0.0)
    for names in buckets:
        now_s = max([now_s, *(at_s[name] for name in names if name in at_s)])
        bucketed += [LayerEvent(READY, name, now_s) for name in names]
    return bucketed
