"""LayerWatch: what every layer of a model takes, measured in the steps of its own training.

Unlike ``profile`` it runs no step itself and changes none: hooks note the time where a layer is
entered and where a gradient is ready. Every moment of a step, from its first layer's entry to the
last gradient, is charged to some layer, by the rules of ``LayerTimer``; but what lies between the
end of the model's forward and the first gradient, the loss with it, counts as backward of the layer
whose gradient that is, as no hook tells where the backward pass begins. Under DDP gradients are
ready when their whole bucket is, and all seconds of a bucket are those of its first gradient.
"""

from __future__ import annotations

import datetime
import statistics
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import inf
from time import perf_counter as clock
from time import thread_time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...runtime.step.hooked import Hooked
from ..data.profile import Profile
from .layers import Seen, device_waiter, in_order, layers_of, scaled_medians


class _Marks(NamedTuple):
    """The marks of one step: its forward pass, and the gradients in the order in which they came.

    ``other_s`` are the seconds between the end of the step before it and its first layer's entry.
    """

    other_s: float
    entered: list[tuple[nn.Module, float]]
    left_s: float
    ready: list[tuple[str, float]]
    core_s: float
    """Seconds of a core that its thread had for both passes; infinite where two threads made them.
    """


class LayerWatch:
    """Hooks in a living model; ``step_ended`` closes a step, ``profile`` tells what they took.

    ``params`` are the parameters whose gradients count, by name. Of several backward passes that
    accumulate before an exchange the last one counts, and those before it are ``other_s``. Under
    DDP ``model`` is the module inside, and the buckets of ``ddp`` tell when gradients are ready.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[str, Tensor],
        ddp: DistributedDataParallel | None = None,
    ) -> None:
        self._model, self._params = model, dict(params)
        self._wait = device_waiter({param.device for param in params.values()})
        self._steps: list[_Marks] = []
        self.seconds: list[tuple[float, float]] = []
        """Two figures of each step: its seconds up to the last gradient, and those of them in which
        a core worked for its thread. (0, 0) for a step that was not seen as a whole."""
        self._last_s: float | None = None
        self._batch_size = 1
        self._ddp = ddp
        self._clear()
        self._undo = ExitStack()
        # Hooks inside of a compiled model would cut its graph: it is one layer.
        for module in (model,) if hasattr(model, "_orig_mod") else model.modules():
            hook = Hooked(module.register_forward_pre_hook, self._enter, with_kwargs=True)
            self._undo.callback(hook.remove)
        self._undo.callback(Hooked(model.register_forward_hook, self._leave).remove)
        for name, param in self._params.items():
            self._undo.callback(self._watch(name, param).remove)

    def remove(self) -> None:
        """Removes all hooks."""
        self._undo.close()

    @property
    def num_steps(self) -> int:
        """The steps that were seen as a whole."""
        return len(self._steps)

    @property
    def other_s(self) -> float:
        """Seconds of a step in which neither layers nor the exchange are at work: the optimizer,
        the next batch."""
        return statistics.median(step.other_s for step in self._steps)

    def step_ended(self) -> None:
        """Closes a step whose means have arrived."""
        if self._last_s is not None:
            self.seconds.append((0.0, 0.0))
        if self._entered and self._grads and self._last_s is not None:
            began_s, ready_s = self._entered[0][1], self._grads[-1][1]
            other_s = began_s - self._last_s
            (thread, before_s), (last_thread, after_s) = self._began, self._ended
            core_s = after_s - before_s if thread == last_thread else inf
            self._steps.append(_Marks(other_s, self._entered, self._left_s, self._grads, core_s))
            self.seconds[-1] = (other_s + ready_s - began_s, other_s + core_s)
        self._clear()
        self._last_s = clock()

    def profile(self) -> Profile:
        """The profile of the steps so far; there is at least one."""
        seen, buckets = self._seen(), self._buckets()
        charged = [_charged(step, seen, buckets) for step in self._steps]
        forward_s, backward_s = ([pair[part] for pair in charged] for part in (0, 1))
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return Profile(
            model=type(self._model).__name__,
            source=f"measured in {len(charged)} dense steps of the training itself, {today}",
            batch_size=self._batch_size,
            layers=layers_of(
                seen,
                scaled_medians(forward_s, [sum(step) for step in forward_s]),
                scaled_medians(backward_s, [sum(step) for step in backward_s]),
            ),
        )

    def _seen(self) -> Seen:
        called = list(dict.fromkeys(module for module, _ in self._steps[0].entered))
        order = called if self._model in called else [self._model, *called]
        watched: dict[str, Any] = dict(self._params)
        return in_order(self._model, watched, order, self._batch_size)

    def _buckets(self) -> list[list[str]]:
        """The names of parameters whose gradients DDP has ready together, in the order of buckets.

        Without DDP there are none.
        """
        if self._ddp is None:
            return []
        names = {id(param): name for name, param in self._params.items()}
        buckets = self._ddp.reducer._get_zeros_like_grad_buckets()  # as DDP itself asks for them
        return [[names[id(p)] for p in bucket.parameters() if id(p) in names] for bucket in buckets]

    def _clear(self) -> None:
        self._entered: list[tuple[nn.Module, float]] = []
        self._grads: list[tuple[str, float]] = []
        self._left_s = 0.0
        self._began = self._ended = (0, 0.0)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A forward pass inside of a backward one is a recomputation, and counts there.
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        # Of a backward pass that accumulated.
        if self._grads:
            self._clear()
        self._wait()
        if not self._entered:
            self._began = threading.get_ident(), thread_time()
        self._entered.append((module, clock()))
        if module is self._model:
            given = (*args, *kwargs.values())
            sizes = [len(one) for one in given if isinstance(one, Tensor) and one.dim()]
            self._batch_size = sizes[0] if sizes and sizes[0] else 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._entered and not self._grads:
            self._wait()
            self._left_s = clock()

    def _ready(self, name: str) -> None:
        self._wait()
        self._grads.append((name, clock()))
        self._ended = threading.get_ident(), thread_time()

    def _watch(self, name: str, param: Any) -> Any:
        this = weakref.ref(self)  # the garbage collector does not see what a parameter's hooks hold

        def ready(param: Tensor) -> None:
            watch = this()
            if watch is not None:
                watch._ready(name)

        hook = param.register_post_accumulate_grad_hook(ready)
        # First: behind the exchange's hook it would keep the gradient from being lent.
        param._post_accumulate_grad_hooks.move_to_end(hook.id, last=False)
        return hook


def _in_buckets(
    ready: Sequence[tuple[str, float]], buckets: Sequence[Sequence[str]]
) -> list[tuple[str, float]]:
    """Gradients as DDP has them ready: those of a bucket with the last of them, in its order.

    A bucket is ready after all those before it. First ones without any gradient take no time.

    >>> _in_buckets([("c", 1.0), ("a", 2.0), ("b", 3.0)], [["c", "b"], ["a"]])
    [('c', 3.0), ('b', 3.0), ('a', 3.0)]
    >>> _in_buckets([("a", 5.0)], [["unused"], ["a"]])
    [('unused', 5.0), ('a', 5.0)]
    """
    if not buckets:
        return list(ready)
    at_s, found = dict(ready), list[tuple[str, float]]()
    now_s = min(at_s.values(), default=0.0)
    for names in buckets:
        now_s = max([now_s, *(at_s[name] for name in names if name in at_s)])
        found += [(name, now_s) for name in names]
    return found


def _charged(
    step: _Marks, seen: Seen, buckets: Sequence[Sequence[str]]
) -> tuple[list[float], list[float]]:
    """Seconds of a step's layers, forward and backward."""
    place = {module: number for number, (_, module) in enumerate(seen.layers)}
    forward_s, backward_s = [0.0] * len(place), [0.0] * len(place)
    at, last_s = 0, step.entered[0][1]
    for module, now_s in step.entered:
        if module in place:
            forward_s[at] += now_s - last_s
            at, last_s = place[module], now_s
    end_s = max(step.left_s, last_s)
    forward_s[at] += end_s - last_s
    last_s = end_s
    for name, now_s in _in_buckets(step.ready, buckets):
        backward_s[seen.parameters[name][1]] += now_s - last_s
        last_s = now_s
    return forward_s, backward_s
