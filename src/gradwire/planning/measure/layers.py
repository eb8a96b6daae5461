"""profile: what every layer of a model takes, forward and backward, measured in the model's own
steps.

Source: US-Byte, section 5.1: hooks at every tensor, a device synchronisation at each, the interval
    between two synchronisations, averaged over 50 measurements.
Differences from the paper: the median and not the mean, as other work on the machine only ever adds
    time. Forward times come from the same steps, not from a copy of the model's code. Every moment
    of a step is charged to some layer (``LayerTimer`` says to which), and layers' medians are
    scaled to the median of steps without hooks that ran in turn with those with hooks: they add
    up to what the step really takes, and the hooks' own time is not in them."""

from __future__ import annotations

import datetime
import platform
import random
import statistics
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter as clock
from typing import Any, NamedTuple, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...errors import InvalidSetting, invalid
from ...runtime.step.messages import as_reals
from ..data.profile import GradientDType, Layer, Measurement, Profile, ProfiledTensor

# ---- LayerTimer --------------------------------------------------------------------------------
#
# Charges every moment of a step to one layer's forward or backward.
#
# A mark ends a stretch of time. In the forward pass a layer's marks are where it is entered, so
# what runs between two layers (activations, residual sums, the loss) is charged to the earlier
# one: it waits for no other parameters. In the backward pass a layer's marks are where a gradient
# of it is ready, so what runs between two layers is charged to the later one, which waits for it.
# Both ways nothing is lost and nothing counts twice.


class LayerTimer:
    """Seconds of one step at a time, by layer: ``forward_s[i]`` and ``backward_s[i]``.

    ``synchronise`` waits until the device has done what was asked of it; it is called at each mark.
    ``order`` lists the parameters whose gradients became ready, in that order.
    """

    def __init__(self, num_layers: int, synchronise: Callable[[], None]) -> None:
        self._num_layers, self._synchronise = num_layers, synchronise
        self._begin()

    def _begin(self) -> None:
        self.forward_s = [0.0] * self._num_layers
        self.backward_s = [0.0] * self._num_layers
        self.order: list[str] = []
        self.num_backwards = 0
        self._entered = self._last_ready = 0
        self._depth = 0  # reentrant checkpoints call backward inside of backward
        self._synchronise()
        self._last_s = clock()

    def run(self, step: Callable[[], object]) -> None:
        """Runs one step; its seconds then stand in ``forward_s`` and ``backward_s``."""
        self._begin()
        with _watched_backward(self):
            step()
        self._charge(self.forward_s, self._entered)

    @property
    def step_s(self) -> float:
        """Seconds of the last step: what was charged, all in all."""
        return sum(self.forward_s) + sum(self.backward_s)

    def enter(self, layer: int) -> None:
        """A layer's forward begins; within a backward it is a recomputation, which counts there."""
        if not self._depth:
            self._charge(self.forward_s, self._entered)
            self._entered = layer

    def ready(self, layer: int, name: str) -> None:
        """A gradient of a layer is ready."""
        self._charge(self.backward_s, layer)
        self._last_ready = layer
        self.order.append(name)

    def backward_begins(self) -> None:
        if not self._depth:
            self._charge(self.forward_s, self._entered)
            self.num_backwards += 1
        self._depth += 1

    def backward_ends(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._charge(self.backward_s, self._last_ready)
            self._entered = 0  # what a step does afterwards, the next forward waits for

    def _charge(self, seconds: list[float], layer: int) -> None:
        self._synchronise()
        now_s = clock()
        seconds[layer] += now_s - self._last_s
        self._last_s = now_s


@contextmanager
def hooked(
    timer: LayerTimer, entries: Mapping[nn.Module, int], parameters: Mapping[str, Any]
) -> Iterator[None]:
    """Hooks that mark the entry of each module, and the gradient of each parameter by its name.

    ``entries`` maps modules to layers; ``parameters`` names to (parameter, layer).
    """
    with ExitStack() as stack:
        for module, layer in entries.items():
            stack.callback(module.register_forward_pre_hook(_entering(timer, layer)).remove)
        for name, (parameter, layer) in parameters.items():
            hook = _getting_ready(timer, layer, name)
            stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        yield


def _entering(timer: LayerTimer, layer: int) -> Callable[..., None]:
    return lambda module, inputs: timer.enter(layer)


def _getting_ready(timer: LayerTimer, layer: int, name: str) -> Callable[..., None]:
    return lambda parameter: timer.ready(layer, name)


@contextmanager
def _watched_backward(timer: LayerTimer) -> Iterator[None]:
    """Tells the timer where backward passes begin and end.

    ``loss.backward()`` looks ``torch.autograd.backward`` up at each call. No hook fires before the
    first gradient is computed, so there is no other place that knows when the loss is.
    """
    original = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        timer.backward_begins()
        try:
            original(*args, **kwargs)
        finally:
            timer.backward_ends()

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original


# ---- untouched ---------------------------------------------------------------------------------
#
# Runs steps of somebody's model and leaves everything about it as it was.


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Gives back gradients, buffers, training modes and random numbers at the end of the block.

    Gradients are set aside at its beginning, as the same tensors. Parameters are not copied:
    nothing in the block may change them (see ``versions``).
    """
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    for parameter, _ in grads:
        parameter.grad = None
    try:
        with _same_random_numbers():
            yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        for module, mode in modes:
            module.training = mode
        for module, name, buffer, content in buffers:
            module._buffers[name] = buffer
            if buffer is not None and content is not None:
                with torch.no_grad():
                    buffer.copy_(content)


def versions(model: nn.Module) -> dict[str, int]:
    """A number a parameter that grows whenever its values are written in place."""
    return {name: parameter._version for name, parameter in model.named_parameters()}


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """After the block, code draws the random numbers that it would have drawn without the block."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


# ---- layers ------------------------------------------------------------------------------------


TrainingStep = Callable[[], object]
"""Runs one forward and backward of the model on one batch; what it returns is not looked at."""

NUM_WARM_UP = 3
ITERATIONS = {"cpu": 20, "cuda": 50}
"""Steps measured where the caller names no number, by device type; 50 is the paper's."""


def profile(
    model: nn.Module,
    step: TrainingStep,
    *,
    iterations: int | None = None,
    batch_size: int | None = None,
    name: str | None = None,
    advance: Callable[..., None] | None = None,
) -> Profile:
    """Measures the seconds of a model's layers, forward and backward.

    It runs ``iterations`` steps with hooks and as many without. The model is left as it was: hooks,
    gradients, buffers, training modes and random numbers are restored. A layer is a module that
    owns parameters, in the order of first calls. For a DDP model communication counts as backward,
    unless ``step`` runs under ``no_sync``.

    Args:
        model: The model.
        step: A function that runs one forward and backward pass on one batch, and no optimizer.
        iterations: Steps to measure. The default depends on the device.
        batch_size: The default is read off the model's first tensor argument.
        name: The model's name in the profile. The default is its class.
        advance: A function that is called after each step as ``advance(amount, note)``.

    Returns:
        The profile.

    Raises:
        InvalidSetting: A step changes a parameter, or runs no backward pass of this model, or a
            parameter gets no gradient.

    >>> model = nn.Linear(4, 2)
    >>> measured = profile(model, lambda: model(torch.ones(3, 4)).sum().backward(), iterations=1)
    >>> len(measured.layers), measured.batch_size
    (1, 3)
    """
    start_s = time.perf_counter()
    model = looked_into(model)
    watched = {key: p for key, p in model.named_parameters() if p.requires_grad}
    if not watched:
        raise invalid("model", type(model).__name__, "one with trainable parameters", "unfreeze")
    devices = {parameter.device for parameter in watched.values()}
    iterations = _number_of_steps(iterations, devices)
    with untouched(model):
        seen = _observe(model, watched, step)
        if batch_size is None and seen.batch_size is None:
            raise invalid("batch_size", None, "given", "no tensor is passed to the model itself")
        times = _measure(seen, step, iterations, device_waiter(devices), advance or no_progress)
    return Profile(
        model=name or type(model).__name__,
        source=_source(devices, iterations),
        batch_size=batch_size or seen.batch_size or 1,
        layers=layers_of(seen, times.forward_s, times.backward_s),
        measurement=Measurement(
            iterations=iterations,
            profiling_s=time.perf_counter() - start_s,
            step_s=times.step_s,
            hooked_step_s=times.hooked_step_s,
            backward_order=times.order,
        ),
    )


def _number_of_steps(wanted: int | None, devices: set[torch.device]) -> int:
    default = ITERATIONS["cuda" if any(device.type == "cuda" for device in devices) else "cpu"]
    if wanted is not None and wanted < 1:
        raise invalid("iterations", wanted, "1 or more", f"{default} is the default")
    return default if wanted is None else wanted


def device_waiter(devices: set[torch.device]) -> Callable[[], None]:
    """A function that waits until all GPUs have done what was asked; a CPU has done it already."""
    on_gpu = [device for device in devices if device.type == "cuda"]

    def synchronise() -> None:
        for device in on_gpu:
            torch.cuda.synchronize(device)

    return synchronise


def no_progress(amount: float = 1, note: str = "") -> None:
    """Does nothing with progress, for callers that give no ``advance``."""


def looked_into(model: nn.Module) -> nn.Module:
    """The module itself, without DDP around it; refuses a compiled one."""
    if hasattr(model, "_orig_mod"):
        remedy = "profile it before it is compiled"
        raise invalid("model", "a compiled one", "one before torch.compile", remedy)
    return model.module if isinstance(model, DistributedDataParallel) else model


@dataclass(frozen=True)
class Seen:
    """A model as one step showed it: its layers, in the order of first calls."""

    layers: list[tuple[str, nn.Module]]
    """Names and modules; a layer begins where its module is entered."""
    parameters: dict[str, tuple[Tensor, int]]
    """Every trainable parameter by name, and the number of its layer."""
    batch_size: int | None


def _observe(model: nn.Module, watched: dict[str, nn.Parameter], step: TrainingStep) -> Seen:
    """Runs a step and looks which modules it calls and which parameters get gradients."""
    called: dict[nn.Module, None] = {}
    sizes: list[int] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        called.setdefault(module)
        if module is model:
            given = (*args, *kwargs.values())
            sizes.extend(len(value) for value in given if isinstance(value, Tensor) and value.dim())

    timer = LayerTimer(1, lambda: None)
    before = versions(model)
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        stack.enter_context(hooked(timer, {}, {key: (p, 0) for key, p in watched.items()}))
        timer.run(step)
    changed = [key for key, version in versions(model).items() if version != before[key]]
    if changed:
        raise _wrong_step(f"changed {_listed(changed)}", "leave the optimizer out of it")
    if not called:
        raise _wrong_step("called no module of this model", "let it run the model given here")
    if not timer.num_backwards:
        raise _wrong_step("ran no backward", "let it call loss.backward()")
    without = sorted(watched.keys() - set(timer.order))
    if without:
        raise _wrong_step(
            f"gave no gradient to {_listed(without)}",
            "set requires_grad to False where none is wanted, or profile a step that uses them",
        )
    # A model that is only called in parts is entered when its step begins.
    order = list(called) if model in called else [model, *called]
    return in_order(model, watched, order, sizes[0] if sizes else None)


def _wrong_step(what: str, remedy: str) -> InvalidSetting:
    return InvalidSetting(
        f"step must run one forward and one backward of the model and nothing else; it {what}; "
        f"{remedy}"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def in_order(
    model: nn.Module,
    watched: dict[str, nn.Parameter],
    called: list[nn.Module],
    batch_size: int | None,
) -> Seen:
    """Gives every parameter to a module of ``called``, which are in the order of first calls."""
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
    return Seen(
        layers=[(names[called[at]] or type(model).__name__, called[at]) for at in kept],
        parameters={key: (p, number[holders[p]]) for key, p in watched.items()},
        batch_size=batch_size,
    )


def _nearest(model: nn.Module, name: str, called: Container[nn.Module]) -> nn.Module:
    """The module of that name or, if it was not called, the nearest one above it that was."""
    while name and model.get_submodule(name) not in called:
        name = name.rpartition(".")[0]
    return model.get_submodule(name)


class _Times(NamedTuple):
    """Seconds of a step: of every layer, and in all without and with hooks."""

    forward_s: list[float]
    backward_s: list[float]
    step_s: float
    hooked_step_s: float
    order: tuple[str, ...]
    """The parameters' names in the order in which their gradients became ready."""


def _measure(
    seen: Seen,
    step: TrainingStep,
    iterations: int,
    synchronise: Callable[[], None],
    advance: Callable[..., None],
) -> _Times:
    """Steps without and with hooks in turn, so that a busy machine slows both."""
    parameters = [parameter for parameter, _ in seen.parameters.values()]
    plain, marked = LayerTimer(1, synchronise), LayerTimer(len(seen.layers), synchronise)
    entries = {module: i for i, (_, module) in enumerate(seen.layers)}
    plain_s, marked_s = list[list[list[float]]](), list[list[list[float]]]()
    for number in range(-NUM_WARM_UP, iterations):
        _forget(parameters)
        plain.run(step)
        _forget(parameters)
        with hooked(marked, entries, seen.parameters):
            marked.run(step)
        advance(1, f"step {number + 1} of {iterations}" if number >= 0 else "warming up")
        if number >= 0:
            plain_s.append([plain.forward_s, plain.backward_s])
            marked_s.append([marked.forward_s, marked.backward_s])
    totals_s = [[sum(one[part]) for one in plain_s] for part in (0, 1)]
    forward_s, backward_s = (
        scaled_medians([one[part] for one in marked_s], totals_s[part]) for part in (0, 1)
    )
    step_s = sum(map(statistics.median, totals_s))
    hooked_step_s = statistics.median(sum(map(sum, one)) for one in marked_s)
    order = dict.fromkeys(reversed(marked.order))  # ready when the last part of it is
    return _Times(forward_s, backward_s, step_s, hooked_step_s, tuple(reversed(order)))


def _forget(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def layers_of(
    seen: Seen, forward_s: Sequence[float], backward_s: Sequence[float]
) -> tuple[Layer, ...]:
    """The layers of a profile, with the seconds of each."""
    return tuple(
        Layer(
            name=name,
            tensors=tuple(
                _tensor(key, parameter)
                for key, (parameter, at) in seen.parameters.items()
                if at == number
            ),
            forward_s=forward_s[number],
            backward_s=backward_s[number],
        )
        for number, (name, _) in enumerate(seen.layers)
    )


def scaled_medians(by_step: Sequence[Sequence[float]], plain_s: Sequence[float]) -> list[float]:
    """Each layer's median, all times one factor so that they add up to the plain steps' median."""
    medians_s = [statistics.median(layer) for layer in zip(*by_step, strict=True)]
    total_s = sum(medians_s)
    factor = statistics.median(plain_s) / total_s if total_s else 0.0
    return [seconds * factor for seconds in medians_s]


def _tensor(name: str, parameter: Tensor) -> ProfiledTensor:
    held = as_reals(parameter)  # which is what travels
    dtype = str(held.dtype).removeprefix("torch.")
    if dtype not in get_args(GradientDType):
        raise invalid(
            f"dtype of parameter {name!r}",
            dtype,
            f"one of {', '.join(get_args(GradientDType))}",
            "cast it",
        )
    return ProfiledTensor(name=name, shape=tuple(held.shape), dtype=cast(GradientDType, dtype))


def _source(devices: set[torch.device], iterations: int) -> str:
    named = sorted(
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"
        for device in devices
    )
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return (
        f"measured on {', '.join(named)}, {today}, torch {torch.__version__}: medians of "
        f"{iterations} steps, scaled to those of steps without hooks"
    )
