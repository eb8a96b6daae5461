"""LayerWatch: what every layer of a model takes, measured in the steps of its own training.

Unlike ``profile`` it runs no step itself and changes none: hooks note the time where a layer is
entered and where a gradient is ready. Every moment of a step, from its first layer's entry to the
last gradient, is charged to some layer, by the rules of ``Marks``; but what lies between the
end of the model's forward and the first gradient, the loss with it, counts as backward of the layer
whose gradient that is, as no hook tells where the backward pass begins. Under DDP gradients are
ready when their whole bucket is, and all seconds of a bucket are those of its first gradient.
"""

from __future__ import annotations

import datetime
import statistics
import threading
from collections.abc import Mapping, Sequence
from math import inf
from time import perf_counter as clock
from time import thread_time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...runtime.step.hooked import Hooked
from ..data.profile import Profile
from .layers import (
    ENTERED,
    LEFT,
    READY,
    Marks,
    Moment,
    charged,
    in_order,
    is_in_backward,
    layers_of,
    scaled_medians,
)


class _Step(NamedTuple):
    """The marks of one step, and the seconds from the end of the step before it."""

    other_s: float
    marks: list[Moment]


class LayerWatch(Marks):
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
        # Hooks inside of a compiled model would cut its graph: it is one layer.
        super().__init__(model, [model] if hasattr(model, "_orig_mod") else model.modules(), params)
        self._undo.callback(Hooked(model.register_forward_hook, self._leave).remove)
        self._steps: list[_Step] = []
        self.seconds: list[tuple[float, float]] = []
        """Two figures of each step: its seconds up to the last gradient, and those of them in which
        a core worked for its thread. (0, 0) for a step that was not seen as a whole."""
        self._last_s: float | None = None
        self._ddp = ddp
        self._began = self._ended = (0, 0.0)

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
        kinds = [mark.kind for mark in self.marks]
        if self._last_s is not None and kinds[:1] == [ENTERED] and kinds[-1] == READY:
            first_s, ready_s = self.marks[0].at_s, self.marks[-1].at_s
            other_s = first_s - self._last_s
            (thread, before_s), (last_thread, after_s) = self._began, self._ended
            core_s = after_s - before_s if thread == last_thread else inf
            self._steps.append(_Step(other_s, self.marks))
            self.seconds[-1] = (other_s + ready_s - first_s, other_s + core_s)
        self.marks = []
        self._last_s = clock()

    def profile(self) -> Profile:
        """The profile of the steps so far; there is at least one."""
        first, buckets = self._steps[0].marks, self._buckets()
        called = [mark.what for mark in first if mark.kind == ENTERED]
        seen = in_order(self._model, self._params, called, self.batch_size)
        pairs = [charged(_in_buckets(step.marks, buckets), seen) for step in self._steps]
        forward_s, backward_s = ([pair[part] for pair in pairs] for part in (0, 1))
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return Profile(
            model=type(self._model).__name__,
            source=f"measured in {len(pairs)} dense steps of the training itself, {today}",
            batch_size=self.batch_size or 1,
            layers=layers_of(
                seen,
                scaled_medians(forward_s, [sum(step) for step in forward_s]),
                scaled_medians(backward_s, [sum(step) for step in backward_s]),
            ),
        )

    def _buckets(self) -> list[list[str]]:
        """The names of parameters whose gradients DDP has ready together, in the order of buckets.

        Without DDP there are none.
        """
        if self._ddp is None:
            return []
        names = {id(param): name for name, param in self._params.items()}
        buckets = self._ddp.reducer._get_zeros_like_grad_buckets()  # as DDP itself asks for them
        return [[names[id(p)] for p in bucket.parameters() if id(p) in names] for bucket in buckets]

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or is_in_backward():
            return
        if self.marks and self.marks[-1].kind == READY:  # of a backward pass that accumulated
            self.marks = []
        if not self.marks:
            self._began = threading.get_ident(), thread_time()
        super()._enter(module, args, kwargs)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.marks and self.marks[-1].kind != READY and not is_in_backward():
            self.note(LEFT)

    def note(self, kind: str, what: Any = None) -> None:
        super().note(kind, what)
        if kind == READY:
            self._ended = threading.get_ident(), thread_time()


def _in_buckets(marks: Sequence[Moment], buckets: Sequence[Sequence[str]]) -> list[Moment]:
    """Marks with gradients as DDP has them ready: with the last of their bucket, in its order.

    A bucket is ready after all those before it. First ones without any gradient take no time.

    >>> ready = [Moment(READY, *one) for one in [("c", 1.0), ("a", 2.0), ("b", 3.0)]]
    >>> [mark[1:] for mark in _in_buckets(ready, [["c", "b"], ["a"]])]
    [('c', 3.0), ('b', 3.0), ('a', 3.0)]
    >>> [mark[1:] for mark in _in_buckets([Moment(READY, "a", 5.0)], [["unused"], ["a"]])]
    [('unused', 5.0), ('a', 5.0)]
    """
    if not buckets:
        return list(marks)
    found = [mark for mark in marks if mark.kind != READY]
    at_s = {mark.what: mark.at_s for mark in marks if mark.kind == READY}
    now_s = min(at_s.values(), default=0.0)
    for names in buckets:
        now_s = max([now_s, *(at_s[name] for name in names if name in at_s)])
        found += [Moment(READY, name, now_s) for name in names]
    return found
