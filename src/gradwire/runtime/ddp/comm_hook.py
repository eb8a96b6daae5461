"""DistributedDataParallel: its communication hook feeds the same synchroniser.

DDP rebuilds its buckets after the first step: same index, same size, other order.
Messages here are gradwire's own and never follow DDP's buckets; a bucket's future
completes when every message that carries one of its gradients is done. State stays with
parameters, and a resumed run is the same run.

Where all of a DDP model's gradients are dense, DDP's own reducer averages and we count.
Its buckets are copied by C++ in the backward pass, and no other way to the same bits is
as fast. So no communication hook is registered, no channel opened and no lane started.
What is left is a count of steps, their bytes and their waits, and the pulse, by which
ranks agree on checkpoints. What it costs the user: a lost rank shows as DDP's own
error, after the time-out of DDP's own group, and gradwire names nobody.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ...collective.steps.travel import bytes_sent
from ...contract.spec import NamedParam
from ...errors import InvalidSetting, invalid, log
from ..grid.reals import as_reals, grad_as_reals
from ..liveness.alarm import said
from ..overlap.overlap import Overlap
from ..step.hooked import Hooked, TemporaryAttribute, is_in_backward
from ..step.hooks import is_inside_a_segment, on_gradient
from ..step.progress import Progress
from ..step.synchroniser import Synchroniser
from ..transport.task_graph import Task, is_interrupt, wall_clock

_serving: WeakKeyDictionary[DistributedDataParallel, Callable[[], DDPHooks | None]]
_serving = WeakKeyDictionary()
"""The hooks of each DDP model that was once attached, whose communication hook stays.

DDP's reducer holds the hook, and the garbage collector does not see into the reducer.
So references are weak: otherwise a dropped DDP would never be freed.
"""


def serve_by(hooks: DDPHooks, ddp: DistributedDataParallel) -> None:
    """Has ``hooks`` serve ``ddp``'s communication hook until their ``remove``.

    DDP's hook has only a weak reference to them, so the caller must keep them.
    """
    if ddp not in _serving:
        try:
            ddp.register_comm_hook(
                None, _make_hook(weakref.ref(ddp), ddp.process_group)
            )
        except RuntimeError as error:
            raise InvalidSetting(
                f"DDP refused the communication hook: {str(error).splitlines()[0]}; a "
                "DDP model has one hook, and mixed_precision= takes it too: build it "
                "without, then attach"
            ) from error
        # DDP's reducer has the hook; this list is what copies would take
        ddp._comm_hooks.pop()
    _serving[ddp] = weakref.ref(hooks)


def renew_reducer(
    ddp: DistributedDataParallel, hooks: DDPHooks | None = None
) -> Callable[[], None]:
    """Has the next forward pass begin with a new reducer.

    ``hooks`` serve it; without them no hook of ours ever does.

    Reducers keep a hook for life, and one that does nothing still takes Python for each
    bucket. The new reducer is made as DDP makes one for an unpickled model, before the
    forward pass, as a backward pass may still be under way. All ranks call this alike.
    Within ``ddp.join()`` it waits, as a rank that has joined has no forward pass. The
    function returned calls it off. The hook stays where DDP tells its reducer more (a
    static graph, delayed parameters), and where torch makes reducers otherwise.
    """
    made = getattr(ddp, "_ddp_init_helper", None)
    is_delaying = bool(getattr(ddp, "_delay_all_reduce_params", []))
    if made is None or ddp.static_graph or is_delaying or ddp not in _serving:
        return lambda: None

    def renew(*_: Any) -> None:
        joining = getattr(ddp, "_join_config", None)
        if joining is not None and joining.enable:
            return
        once.remove()
        params, are_sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
        names = ddp._build_debug_param_to_name_mapping(params)  # type: ignore[no-untyped-call]
        made(params, are_sparse, names, ddp.static_graph)
        _serving.pop(ddp, None)
        if hooks is not None:
            serve_by(hooks, ddp)

    once = Hooked(ddp.register_forward_pre_hook, renew)
    return once.remove


def refuse_fewer(
    ddp: DistributedDataParallel, *, survives: bool = False
) -> Callable[[], None]:
    """Makes a DDP model's ``join()`` refuse to average over fewer ranks.

    Returns a function to undo it.

    DDP divides by fewer ranks only where no communication hook averages. A model that
    ``survives`` lost ranks has no collectives by which DDP could join.
    """
    own: Callable[..., Any] = ddp.join_hook

    def join_hook(**kwargs: Any) -> Any:
        if survives:
            raise invalid(
                "ddp.join()",
                "a call",
                "left out beside on_failure='shrink'",
                "give each rank a batch",
            )
        if not kwargs.get("divide_by_initial_world_size", True):
            raise invalid(
                "divide_by_initial_world_size",
                False,
                "True for a DDP model whose gradients gradwire averages",
                "leave it out",
            )
        return own(**kwargs)

    return TemporaryAttribute(ddp, "join_hook", join_hook).remove


def _make_hook(ddp: Callable[[], DistributedDataParallel | None], group: Any) -> Any:
    def gradwire_hook(state, bucket):  # type: ignore[no-untyped-def]
        served = ddp()
        hooks = None if served is None else _serving.get(served, lambda: None)()
        future = None if hooks is None or hooks.has_left else hooks.serve(bucket)
        if future is not None:
            return future
        own = group if served is None else served.process_group
        return _as_without_hook(own, bucket)

    # DDP checks annotations by identity and knows only real classes, not their names.
    gradwire_hook.__annotations__ = {}
    return gradwire_hook


def _as_without_hook(group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """The mean with the very bits that DDP gives without a hook."""
    buffer = bucket.buffer()
    world = group.size()
    buffer.div_(world) if buffer.is_sparse else buffer.mul_(1 / world)
    work: Any = dist.all_reduce(buffer, group=group, async_op=True)
    mean: torch.futures.Future[Tensor] = work.get_future().then(
        lambda done: done.value()[0]
    )
    return mean


class DDPHooks:
    """Hands DDP's buckets to the synchroniser and completes their futures.

    ``on_end`` is called when all means of a backward pass are in DDP's buckets, still
    inside backward().

    DDP hands in zeros for parameters that this rank did not use. Where it finds them in
    each step (``find_unused_parameters``), it drops the mean of one that no rank used.
    So its residual must not be delivered: this rank hands in None, and ranks tell each
    other which they used.
    """

    overlap: Overlap | None = None
    """None: DDP ends a backward pass when all means are there."""

    def __init__(
        self,
        progress: Progress,
        params: list[NamedParam],
        ddp: DistributedDataParallel,
    ) -> None:
        self._progress = progress
        self._synchroniser = progress.synchroniser
        self._finds_unused = ddp.find_unused_parameters and not ddp.static_graph
        self._shows_buckets = ddp.gradient_as_bucket_view
        self._used: set[str] = set()
        """The parameters used on this rank since the last step, as DDP knows."""
        watched = params if self._finds_unused else ()
        self._hooks = [on_gradient(param, self._note, name) for name, param in watched]
        self._is_removed = False
        self.on_end: Callable[[], None] | None = None
        self._names = {id(param): name for name, param in params}
        self._over = threading.Event()
        self._has_ended = False
        self._waiting: list[_Bucket] = []
        self._completions: list[Task] = []
        """The tasks in which futures of the step are completed."""
        serve_by(self, ddp)

    def remove(self) -> None:
        """Leaves the model to DDP's plain all-reduce."""
        self._is_removed = True
        for hook in self._hooks:
            hook.remove()

    @property
    def has_left(self) -> bool:
        """Whether gradients are DDP's own already, with no open step to wait for."""
        progress = self._progress
        is_over = not self._synchroniser.open and progress.backward() is None
        return self._is_removed or (progress.is_leaving and is_over)

    def _note(self, name: str, param: Tensor) -> None:
        """Notes a parameter as used where a pass leaves it a gradient."""
        if param.grad is not None:
            self._used.add(name)

    def serve(self, bucket: Any) -> torch.futures.Future[Tensor] | None:
        """The future of a bucket's mean.

        None if ``detach`` has left the model to DDP meanwhile.
        """
        if not self._open_if_needed():
            return None
        entry = self._hand_in(bucket)
        self._complete_ready()
        self._close_if_last(entry)
        return entry.future

    def _open_if_needed(self) -> bool:
        """Opens a step with the first bucket; returns whether one is open."""
        if self._synchroniser.open:
            return True
        with self._progress.opening:
            if self.has_left:
                return False
            in_backward = is_in_backward()
            self._synchroniser.counts_use = (
                self._finds_unused and self._synchroniser.keeps_state
            )
            # not once its data have ended
            self._synchroniser.check.trains = in_backward
            self._begin()
            self._over = threading.Event()
            self._has_ended = False
            self._waiting = []
            self._completions = []
            if in_backward:
                # Runs before DDP's own end of backward, which can say of a failed
                # future only that it holds no tensor.
                self._progress.queue_end(self._end_backward)
        return True

    def _begin(self) -> None:
        self._progress.begin_step()

    def _hand_in(self, bucket: Any) -> _Bucket:
        """Hands a bucket's gradients in; it waits unless it is the last."""
        synchroniser = self._synchroniser
        params: list[Tensor] = bucket.parameters()
        names = [self._names[id(param)] for param in params]
        entry = _Bucket(names, bucket.buffer(), synchroniser)
        is_sparse = entry.buffer.is_sparse
        grads = [entry.buffer] if is_sparse else _gradients(bucket)
        for param, name, grad in zip(params, names, grads, strict=True):
            if is_sparse or self._is_used(param, name):
                synchroniser.ready(name, grad)
            else:
                entry.absent[name] = grad
                synchroniser.ready(name, None)
        if not synchroniser.complete:
            self._waiting.append(entry)
        return entry

    def _is_used(self, param: Tensor, name: str) -> bool:
        """Whether a parameter is in the step, also where ``.grad`` shows the bucket."""
        if not self._synchroniser.counts_use or name in self._used:
            return True
        return self._shows_buckets and param.grad is not None and is_in_backward()

    def _complete_ready(self) -> None:
        """Has futures complete of buckets whose messages have all been launched."""
        engine = self._synchroniser.engine
        waiting = []
        for entry in self._waiting:
            ends = self._synchroniser.ends(entry.messages)
            if len(ends) < len(entry.messages):
                waiting.append(entry)
            else:
                self._completions.append(engine.when_done(ends, entry.complete))
        self._waiting = waiting

    def _close_if_last(self, entry: _Bucket) -> None:
        """Closes the step once all gradients are handed in."""
        if not self._synchroniser.complete:
            return
        self._close(entry)
        if is_in_backward():
            # The first bucket may have come in the backward pass of a reentrant
            # checkpoint's own.
            self._progress.queue_end(self._end_backward)
        elif self.on_end is not None:
            self._end_backward()  # of the other ranks, as this one has joined

    def _end_backward(self) -> None:
        is_over = not self._synchroniser.open
        if is_over:
            self._over.wait()
        self._synchroniser.engine.check()
        if is_over and self.on_end is not None and not self._has_ended:
            self._has_ended = True
            self.on_end()

    def _close(self, last: _Bucket) -> None:
        """Ends the step behind its last message.

        The other futures are complete by then, as ``detach`` in another thread closes
        the exchange once the step has ended. The last bucket's future completes only
        then, because DDP returns, and may open the next step, as soon as all futures
        are complete.
        """
        synchroniser = self._synchroniser
        progress = self._progress
        over = self._over
        backward_end_s = wall_clock()
        progress.record_backward(backward_end_s)
        synchroniser.open = False
        self._used.clear()

        def end(failure: BaseException | None) -> None:
            try:
                if failure is None:
                    progress.record_wait(backward_end_s, wall_clock())
                    with synchroniser.streams.beside():
                        synchroniser.take_back_unused()
                        progress.end_step()
            finally:
                last.complete(failure)
                over.set()

        ends = [*synchroniser.all_ends(), *self._completions]
        synchroniser.engine.when_done(ends, end)


class DDPInTurn:
    """Hands a DDP model's gradients to messages or leaves them to DDP, in each step.

    No way to the mean of dense gradients is as fast as DDP's own reducer. So its
    communication hook is taken only when a plan comes. Reducers keep a hook, so behind
    a plan DDP gets a new one. ``on_end`` is called when all means of a backward pass
    are in DDP's buckets, as by `DDPHooks`.
    """

    overlap: Overlap | None = None

    def __init__(
        self,
        progress: Progress,
        ddp: DistributedDataParallel,
        params: list[NamedParam],
    ) -> None:
        self._progress = progress
        self._ddp = ddp
        self._params = params
        self.on_end: Callable[[], None] | None = None
        self.is_left_to_ddp = True
        """Whether DDP's own reducer averages at present."""
        self._undo = ExitStack()
        self._undo.callback(StepCounter(progress, ddp, params, self._ended).remove)

    def use_messages(self, wanted: bool) -> None:
        """Has the next steps averaged by messages, or by DDP.

        Called between two steps.
        """
        if wanted is not self.is_left_to_ddp:
            return
        self.remove()
        if wanted:
            hooks = DDPHooks(self._progress, self._params, self._ddp)
            hooks.on_end = self._ended
            self._undo.callback(hooks.remove)
            self.is_left_to_ddp = False
        else:
            self._undo.callback(renew_reducer(self._ddp))
            counter = StepCounter(self._progress, self._ddp, self._params, self._ended)
            self._undo.callback(counter.remove)

    def remove(self) -> None:
        """Leaves the model to DDP, and counts no more.

        Its reducer stays for the next attach.
        """
        self._undo.close()
        self.is_left_to_ddp = True

    def _ended(self) -> None:
        if self.on_end is not None:
            self.on_end()


def _gradients(bucket: Any) -> list[Tensor]:
    """The gradients in a bucket, complex ones as reals.

    They have their parameters' strides in it, which torch's own list does not know. Of
    complex gradients newer versions of torch give a hook the real view of the buffer,
    cut where it would be cut were it complex. Older ones (2.9) give it the buffer
    itself.
    """
    params: list[Tensor] = bucket.parameters()
    if not params[0].is_complex():
        return [*map(_laid_out, bucket.gradients(), params)]
    buffer = bucket.buffer()
    whole = buffer if buffer.is_complex() else torch.view_as_complex(buffer.view(-1, 2))
    parts = torch.split(whole, [p.numel() for p in params])
    return [
        grad_as_reals(_laid_out(part, param), as_reals(param).shape)
        for part, param in zip(parts, params, strict=True)
    ]


def _laid_out(part: Tensor, param: Tensor) -> Tensor:
    """A parameter's part of a bucket, with the parameter's strides if it is dense."""
    strides = param.stride()
    if (
        param.is_contiguous()
        or torch.empty_like(param, device="meta").stride() != strides
    ):
        return part.view(param.shape)
    return part.as_strided(param.shape, strides)


class _Bucket:
    """One of DDP's buckets on its way."""

    def __init__(
        self, names: list[str], buffer: Tensor, synchroniser: Synchroniser
    ) -> None:
        self.buffer = buffer
        self.messages = synchroniser.ends_of(names)
        self.absent: dict[str, Tensor] = {}
        """Places in the bucket, by name, of gradients that this rank gave as None."""
        self._synchroniser = synchroniser
        self._side = synchroniser.streams.side(buffer.device)
        devices: Any = [] if self._side is None else [self._side.device]
        self.future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=devices
        )

    def complete(self, failure: BaseException | None) -> None:
        """Completes the future, as the bucket's messages are done or a step fails."""
        if failure is not None:
            # A future takes no interrupt, which the end of the backward pass raises.
            held = RuntimeError(said(failure)) if is_interrupt(failure) else failure
            self.future.set_exception(held)  # type: ignore[arg-type]
            return
        # The future is complete when what was launched on the current stream is done.
        with nullcontext() if self._side is None else self._side.use():
            for name, grad in self.absent.items():
                grad.copy_(self._synchroniser.mean(name))
            self.future.set_result(self.buffer)


class StepCounter:
    """Counts the steps of a model left to DDP, until ``remove`` is called.

    They are the backward passes in which DDP itself knows that it exchanges. A forward
    pass that shall be followed by an exchange arms the counter, as it arms DDP's
    reducer. The first gradient after that opens a step, and the end of the backward
    pass closes it. ``on_end`` is called at the end of each step, still inside
    backward(). Raises ``InvalidSetting`` where a communication hook of the user's own
    averages the gradients.
    """

    def __init__(
        self,
        progress: Progress,
        ddp: DistributedDataParallel,
        params: Sequence[NamedParam],
        on_end: Callable[[], None] | None = None,
    ) -> None:
        found = ddp._get_ddp_logging_data().get("comm_hook")  # type: ignore[no-untyped-call]
        if found and ddp not in _serving:  # else it is gradwire's, of an attach before
            raise invalid(
                "the DDP model's communication hook",
                found,
                "unset, since it averages gradients (mixed_precision= sets it too)",
                "build the model without it, then attach",
            )
        if on_end is None:
            log.info(
                "all gradients are dense: DDP's own reducer averages them, and "
                "gradwire counts"
            )
        self._progress = progress
        self._engine = progress.synchroniser.engine
        self._on_end = on_end
        self._lock = threading.Lock()
        self._is_armed = False
        tensors: list[Any] = [param for _, param in params]
        counted = sum(tensor.nbytes for tensor in tensors)
        if ddp.find_unused_parameters:
            counted += 4 * len(tensors)  # DDP tells ranks which parameters were used
        self._step_bytes = bytes_sent("all_reduce", counted, self._engine.world)
        self._forward = Hooked(ddp.register_forward_hook, self._arm)
        # What a rank whose data have ended does last in a step, so that others are as
        # far.
        last = "_match_all_reduce_for_bwd_pass"
        if ddp.find_unused_parameters:
            last = "_match_unused_params_allreduce"
        self._joined = TemporaryAttribute(
            ddp, last, partial(self._after_join, getattr(ddp, last))
        )
        # Else each parameter has a gradient in each step, as DDP raises where one has
        # none.
        some_unused = ddp.find_unused_parameters or ddp.static_graph
        watched = tensors if some_unused else tensors[-1:]
        self._hooks = [on_gradient(param, self._began) for param in watched]

    def remove(self) -> None:
        for one in (self._forward, self._joined, *self._hooks):
            one.remove()

    def _arm(self, ddp: DistributedDataParallel, args: Any, output: Any) -> None:
        if not (torch.is_grad_enabled() and ddp.require_backward_grad_sync):
            return
        self._is_armed = True
        # With a pilot the step begins where the backward pass enters the model, which
        # is not in a segment. The first gradient may come in the nested pass of a
        # reentrant checkpoint, at whose end the step is not over.
        for one in tree_leaves(output) if self._on_end is not None else ():
            if isinstance(one, Tensor) and one.requires_grad:
                one.register_hook(lambda _: self._began())  # type: ignore[no-untyped-call]

    def _began(self, param: Tensor | None = None) -> None:
        with self._lock:  # autograd has one thread a device
            was_armed = self._is_armed
            self._is_armed = False
        if was_armed:
            if param is not None and self._on_end is not None and is_inside_a_segment():
                raise self._progress.give_up(
                    "a pilot (auto) cannot see where the backward pass ends: it begins "
                    "inside a segment of a reentrant activation checkpoint, and no "
                    "tensor was found in the model's output; use_reentrant=False is "
                    "accepted, as are tuples and dicts"
                )
            self._engine.check()
            self._open()
            self._progress.queue_end(self._end, self._note_backward)

    def _note_backward(self) -> None:
        self._computed_s = wall_clock()
        self._progress.record_backward(self._computed_s)

    def _end(self) -> None:
        """Ends a step after DDP's own end of the backward, which awaits its buckets."""
        self._progress.record_wait(self._computed_s, wall_clock())
        self._close()

    def _open(self) -> None:
        self._progress.begin_without_messages()
        self._engine.begin_step(self._progress.step, launched=1)

    def _close(self) -> None:
        self._progress.end_step(self._step_bytes)
        if self._on_end is not None:
            self._on_end()

    def _after_join(self, match: Callable[[], None]) -> None:
        """Counts a step of the others that this rank joins after its data ended."""
        match()
        self._open()
        self._close()
