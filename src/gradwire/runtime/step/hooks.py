"""Hooks into a plain nn.Module: gradients as autograd accumulates them, and the end of backward."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from ...errors import RankFailed
from ..grid.dtensors import put_grad, shard_of_grad
from ..setup.refusals import Strangers
from .hooked import untraced
from .messages import grad_as_reals
from .progress import Progress
from .task_graph import wall_clock

if TYPE_CHECKING:
    from ..overlap.overlap import Overlap


class Shrinks(Protocol):
    """The way in which ranks go on without lost ones, asked before each step; see `shrink`."""

    def before_step(self) -> None: ...

    def failed(self, failure: RankFailed) -> None: ...


class ModuleHooks:
    """Hands one plain module's gradients to the synchroniser, and ends its backward passes.

    A backward pass ends by a wait for its means, or is left to ``overlap``. Then
    ``on_end`` is called, still inside backward(). ``on_begin`` is called before a step is opened.
    While ``is_paused``, or while the model's ``require_backward_grad_sync`` is False, gradients
    accumulate on this rank and are not exchanged.
    """

    def __init__(
        self,
        progress: Progress,
        params: Sequence[tuple[str, Tensor]],
        overlap: Overlap | None,
        strangers: Strangers,
    ) -> None:
        self._progress, self._synchroniser = progress, progress.synchroniser
        self._synchroniser.counts_use = True
        self.overlap, self._strangers = overlap, strangers
        self.params = dict(params)
        self.on_begin: Callable[[], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self.shrinking: Shrinks | None = None
        """The way to go on without lost ranks; None where their loss ends the run."""
        self.is_paused = False
        self.switch: Mapping[str, object] = {}
        """The model's attributes, of which loops written for DDP set one."""
        self.ends_behind_others = False
        """Whether callbacks at the end of a backward pass bring gradients too, as FSDP's do."""
        self._is_attached = True
        self._versions: dict[str, int] = {}
        self._hooks = {name: self._hook(param, name) for name, param in params}

    def trains(self, does: bool) -> None:
        """Notes whether this rank steps its parameters."""
        self._synchroniser.check.trains = does

    def remove(self) -> None:
        """Hands in no further gradient."""
        self._is_attached = False
        for hook in self._hooks.values():
            hook.remove()

    def _hook(self, param: Any, name: str) -> Any:
        # The garbage collector does not see what a parameter's hooks refer to: were it this
        # object, and through it the parameters, a dropped model would never be freed.
        this = weakref.ref(self)

        def hook(param: Tensor) -> None:
            hooks = this()
            if hooks is not None:
                hooks._accept(name, param)

        return param.register_post_accumulate_grad_hook(untraced(hook))

    def _accept(self, name: str, param: Tensor) -> None:
        """Takes the gradient that autograd has just accumulated."""
        if not self._is_attached:
            return
        self._synchroniser.engine.refuse_copy()
        if self.is_paused or not self.switch.get("require_backward_grad_sync", True):
            if self.overlap is not None:
                self.overlap.take(name)
            if self._synchroniser.open and self._is_retry(name):  # of a step that accumulates
                try:
                    self._synchroniser.abandon(name, is_retry=True)
                except RankFailed as failure:
                    self._failed(failure)
            self._synchroniser.look(self._progress.step)  # what accumulates is this rank's own
            return
        try:
            with self._progress.opening:
                if self._progress.is_leaving and self._progress.backward() is None:
                    return
                self._begin_backward(name)
            grad = self._expected(name, param)
            self._synchroniser.ready(name, grad, is_shared=self._is_shared(name, grad))
        except RankFailed as failure:
            self._failed(failure)

    def _failed(self, failure: RankFailed) -> None:
        """Returns where the step counts all the same, else raises."""
        if self.shrinking is None:
            raise failure
        self.shrinking.failed(failure)

    def _begin_backward(self, name: str) -> None:
        """Opens a step, if this is the first gradient of a backward pass."""
        if self.overlap is not None:
            self.overlap.take(name)
        synchroniser = self._synchroniser
        if synchroniser.open and (name in synchroniser.grads or self._progress.backward() is None):
            synchroniser.abandon(name, is_retry=self._is_retry(name))
        if not synchroniser.open:
            self._open_step()
            self._progress.queue_end(
                self._end_backward, self._hand_in_rest, behind_others=self.ends_behind_others
            )

    def _is_retry(self, name: str) -> bool:
        """Whether an earlier backward pass raised, and the loop has let go of its gradients since.

        Means may still be on their way into these, so no gradient of a retry may lie there.
        ``name`` is the parameter with the first new one.
        """
        others = [param for own, param in self.params.items() if own != name]
        are_dropped = bool(others) and all(param.grad is None for param in others)
        return self._progress.backward() is None and self.overlap is None and are_dropped

    def _open_step(self) -> None:
        self._refuse_wrong_step()
        if self.shrinking is not None:
            self.shrinking.before_step()
        if self.on_begin is not None:
            self.on_begin()
        self._progress.begin_step()
        self._versions = {name: param._version for name, param in self.params.items()}

    @torch.no_grad()
    def backward_without_batch(self) -> None:
        """Makes a step in which this rank has no gradient; every ``.grad`` is the mean then."""
        for param in self.params.values():
            param.grad = None
        is_retry = self._is_retry("")
        end = self._progress.ending(self._end_backward)
        if self._synchroniser.open:
            self._synchroniser.abandon("a step without a batch", is_retry=is_retry)
        try:
            self._open_step()
        except RankFailed as failure:
            self._failed(failure)
        end()

    def _refuse_wrong_step(self) -> None:
        """Refuses a backward pass that must not begin a step, before anything is launched.

        The other ranks are told.
        """
        self._strangers.before_backward()
        if is_inside_a_segment():
            raise self._progress.give_up(
                "a backward pass began inside a segment of a reentrant activation checkpoint, "
                "where no step can end; use_reentrant=False is accepted"
            )
        if _is_compiled():
            raise self._progress.give_up(
                "compiled autograd runs this backward pass, whose end no hook can see; call "
                "backward() outside of what torch.compile compiles, or leave "
                "torch._dynamo.config.compiled_autograd False (the model may be compiled)"
            )

    def _expected(self, name: str, param: Tensor) -> Tensor | None:
        """The gradient in the form its messages read; no other rank takes part in this.

        A sparse gradient is made dense if its module did not announce one.
        """
        synchroniser, grad = self._synchroniser, param.grad
        if grad is not None and grad.__class__ is not Tensor:
            grad = shard_of_grad(param)
        if grad is not None and grad.is_sparse and name not in synchroniser.row_sparse:
            grad = param.grad = torch.zeros_like(param).add_(grad)  # strided as the parameter
        if grad is not None and grad.is_complex():
            shape = synchroniser.params[name].shape
            reals = grad_as_reals(grad, shape)
            if reals.data_ptr() != grad.data_ptr():
                put_grad(param, reals)
                put = shard_of_grad(param)
                assert put is not None, "it was put there"
                reals = grad_as_reals(put, shape)
            grad = reals
        return grad

    def _is_shared(self, name: str, grad: Tensor | None) -> bool:
        """Whether somebody else may look at the memory of a gradient during the backward pass.

        Autograd itself may: the gradient of what goes into a ``cat`` is a part of what comes out of
        it, and may be needed for other gradients that are still to be computed. So may a hook of
        the user's that comes after the one here.
        """
        if grad is None:
            return False
        hooks: Any = self.params[name]._post_accumulate_grad_hooks
        is_last = next(reversed(hooks), None) == self._hooks[name].id
        return not is_last or (grad.layout == torch.strided and _holders(grad) != _ALONE)

    def _end_backward(self) -> None:
        try:
            self._finish()
        except RankFailed as failure:
            self._failed(failure)

    def _hand_in_rest(self) -> None:
        """Hands in what no hook has brought, before any attached model waits for its means."""
        try:
            self._complete()
        except RankFailed as failure:
            self._failed(failure)

    def _complete(self) -> None:
        synchroniser = self._synchroniser
        for name in [name for name in self.params if name not in synchroniser.grads]:
            # A gradient that accumulated under no_sync counts, though no hook brought it today.
            grad = self._expected(name, self.params[name])
            synchroniser.ready(name, grad, is_shared=self._is_shared(name, grad))

    def _finish(self) -> None:
        synchroniser = self._synchroniser
        self._complete()
        if self.overlap is None:  # which steps parameters while gradients come in
            self._refuse_stepped()
        synchroniser.close()
        self._progress.mark_backward(wall_clock())
        if self.overlap is None:
            self._progress.finish()
        else:
            self.overlap.defer({name: param.grad for name, param in self.params.items()})
        if self.on_end is not None:
            self.on_end()

    def _refuse_stepped(self) -> None:
        """Refuses parameters that changed in the backward pass, before their means were there."""
        versions = self._versions.items()
        if stepped := [name for name, version in versions if self.params[name]._version != version]:
            raise self._progress.give_up(
                f"parameter {stepped[0]} changed during the backward pass ({len(stepped)} such), "
                "so a hook has stepped it with this rank's own gradient; step the optimizer after "
                "backward(), when the means are there"
            )


def _holders(grad: Tensor) -> int:
    """The tensors that have the memory of ``grad``, and the look itself."""
    count: int = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    return count


_ALONE = _holders(torch.empty(1, device="cpu"))


def _is_compiled() -> bool:
    """Whether compiled autograd runs this backward pass: it calls nothing back at its end."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "in_compiled_autograd_region", False))


def is_inside_a_segment() -> bool:
    """Whether this thread is in the nested backward pass of a reentrant checkpoint."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.backward.__code__:
        frame = frame.f_back
    return frame is not None
