"""DDP's own reducer: where all of a DDP model's gradients are dense, it averages and we count.

Its buckets are copied by C++ in the backward pass, and no other way to the same bits is as fast. So
no communication hook is registered, no channel opened and no lane started. What is left is a count
of steps, their bytes and their waits, and the pulse, by which ranks agree on checkpoints. What it
costs the user: a lost rank shows as DDP's own error, after the time-out of DDP's own group, and
gradwire names nobody.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ...contract.travel import bytes_sent
from ...errors import invalid
from ...planning.default_fusion import NamedParam
from ..step.hooked import Hooked, InPlaceOf
from ..step.hooks import is_inside_a_segment
from ..step.progress import Progress
from ..step.task_graph import wall_clock
from .comm_hook import has_own_hook

_log = logging.getLogger("gradwire")


def count_steps(
    progress: Progress,
    ddp: DistributedDataParallel,
    params: Sequence[NamedParam],
    on_end: Callable[[], None] | None = None,
) -> Callable[[], None]:
    """Counts the steps of a model that is left to DDP until the function returned is called.

    ``on_end`` is called at the end of each, still inside backward(). Raises ``InvalidSetting``
    where a communication hook of the user's own averages the gradients.
    """
    found = ddp._get_ddp_logging_data().get("comm_hook")  # type: ignore[no-untyped-call]
    if found and not has_own_hook(ddp):
        raise invalid(
            "the DDP model's communication hook",
            found,
            "unset, since it averages gradients (mixed_precision= sets it too)",
            "build the model without it, then attach",
        )
    if on_end is None:
        _log.info("all gradients are dense: DDP's own reducer averages them, and gradwire counts")
    return _Counter(progress, ddp, params, on_end).remove


class _Counter:
    """Counts the backward passes in which DDP exchanges gradients, as DDP itself knows them.

    A forward pass that shall be followed by an exchange arms it, as it arms DDP's reducer. The
    first gradient after that opens a step, and the end of the backward pass closes it.
    """

    def __init__(
        self,
        progress: Progress,
        ddp: DistributedDataParallel,
        params: Sequence[NamedParam],
        on_end: Callable[[], None] | None,
    ) -> None:
        self._progress, self._engine = progress, progress.synchroniser.engine
        self._on_end = on_end
        self._lock, self._is_armed = threading.Lock(), False
        tensors: list[Any] = [param for _, param in params]
        counted = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if ddp.find_unused_parameters:
            counted += 4 * len(tensors)  # DDP tells ranks which parameters were used
        self._step_bytes = bytes_sent("all_reduce", counted, self._engine.world)
        # Else each parameter has a gradient in each step, as DDP raises where one has none.
        some_unused = ddp.find_unused_parameters or ddp.static_graph
        this = weakref.ref(self)  # the garbage collector does not see into a parameter's hooks

        def began(_: Tensor) -> None:
            counter = this()
            if counter is not None:
                counter._began(by_gradient=True)

        self._forward = Hooked(ddp.register_forward_hook, self._arm)
        # What a rank whose data have ended does last in a step, so that others are as far.
        unused = ddp.find_unused_parameters
        last = "unused_params_allreduce" if unused else "all_reduce_for_bwd_pass"
        self._joined = InPlaceOf(ddp, f"_match_{last}", self._after_join)
        watched = tensors if some_unused else tensors[-1:]
        self._hooks = [param.register_post_accumulate_grad_hook(began) for param in watched]

    def remove(self) -> None:
        for one in (self._forward, self._joined, *self._hooks):
            one.remove()

    def _arm(self, ddp: DistributedDataParallel, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            self._is_armed = True
            if self._on_end is not None:
                self._begin_with(output)

    def _begin_with(self, output: Any) -> None:
        """Has the step begin where the backward pass enters the model, which is not in a segment.

        The first gradient may come in the nested pass of a reentrant checkpoint, at whose end the
        step is not over.
        """
        for one in tree_leaves(output):
            if isinstance(one, Tensor) and one.requires_grad:
                one.register_hook(lambda _: self._began())  # type: ignore[no-untyped-call]

    def _began(self, *, by_gradient: bool = False) -> None:
        if self._disarmed():
            if by_gradient and self._on_end is not None and is_inside_a_segment():
                raise self._progress.give_up(
                    "a pilot (auto) cannot see where the backward pass ends: it begins inside a "
                    "segment of a reentrant activation checkpoint, and no tensor was found in the "
                    "model's output; use_reentrant=False is accepted, as are tuples and dicts"
                )
            self._begin()

    def _disarmed(self) -> bool:
        """Disarms the count, if it is armed; returns whether it was."""
        with self._lock:  # autograd has one thread a device
            was_armed, self._is_armed = self._is_armed, False
            return was_armed

    def _begin(self) -> None:
        self._engine.check()
        self._open()
        self._queue_end()

    def _queue_end(self) -> None:
        """Has autograd call back when this backward pass and DDP's averages have ended."""
        queue = torch.autograd.Variable._execution_engine.queue_callback

        def computed() -> None:
            now_s = wall_clock()
            self._progress.mark_backward(now_s)
            # Behind DDP's own end of this backward pass, which waits for its buckets.
            queue(lambda: self._end(now_s))

        self._progress.backward = weakref.ref(computed)
        queue(computed)

    def _end(self, computed_s: float) -> None:
        self._progress.mark_wait(computed_s, wall_clock())
        self._close()

    def _open(self) -> None:
        self._progress.begin_without_messages()
        self._engine.begin_step(self._progress.step, launched=1)

    def _close(self) -> None:
        self._progress.end_step(self._step_bytes)
        if self._on_end is not None:
            self._on_end()

    def _after_join(self, match: Callable[[], None]) -> None:
        """Counts a step of the others in which this rank, whose data have ended, takes part."""
        match()
        self._open()
        self._close()
