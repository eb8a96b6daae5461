"""Hooks into a plain nn.Module: gradients as they come, and the end of backward."""

import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointFunction

from ...contract.spec import NamedParam
from ...errors import RankFailed
from ..grid.dtensors import is_dtensor, put_grad, shard_of_grad, sharded_modules
from ..grid.reals import grad_as_reals
from ..transport.task_graph import wall_clock
from .hooked import Hooked, frame_of, untraced
from .local_gradients import LocalGradients
from .progress import Progress
from .refusals import (
    exchanged_by,
    record_attached,
    refuse_grad_dtype,
    shown_as_around,
)


class DefersGradients(Protocol):
    """A plan's overlap with the next forward pass.

    It takes gradients, and waits for them later.
    """

    num_overlapped: int
    """The steps whose means could arrive during the next forward pass."""
    fallbacks: Counter[str]
    """The other steps, which were waited for earlier, counted by the reason."""

    @property
    def is_open(self) -> bool:
        """Whether gradients are pending: their exchange is not waited for yet."""

    def take(self, name: str) -> None:
        """Waits for the pending step, as the gradient ``name`` of the next one came."""

    def defer(self, grads: Mapping[str, Tensor | None]) -> None:
        """Makes gradients, by name, pending at the end of a backward pass."""

    def settle(self, reason: str | None, *, level: int = logging.WARNING) -> None:
        """Waits for all means, and makes the optimizer's pending step.

        ``reason`` says in the log why this cannot happen later.
        """

    def detach(self) -> None:
        """Ends the overlap."""


def on_gradient(param: Any, method: Any, *before: Any) -> Any:
    """Has a bound ``method`` called whenever autograd has accumulated a gradient.

    Returns the hook. The method is called with ``before`` and the parameter. The
    garbage collector does not see the references of a parameter's hooks. So the hook
    refers weakly to the method's object, which refers to the model. Otherwise a dropped
    model would never be freed.
    """
    # A WeakMethod is written in Python, and would take a tenth of the hook's time.
    this = weakref.ref(method.__self__)
    function = method.__func__

    def hook(param: Tensor) -> None:
        owner = this()
        if owner is not None:
            function(owner, *before, param)

    return param.register_post_accumulate_grad_hook(untraced(hook))


_END = object()


class UnattachedParameters:
    """Watches one model for strangers: parameters that came after attach, and that no
    message exchanges.

    ``params`` are the parameters that are exchanged. ``give_up(text)`` announces an
    error of this rank's loop to the others, and returns it.

    ``load_state_dict(assign=True)``, a new head, ``parametrize`` and ``fully_shard``
    replace parameters by strangers, which every rank would train by itself. Once in
    each step a look compares the objects in the model's modules with the objects at
    attach. It takes about 25 us for 400 parameters.

    A stranger is not an error before it gets a gradient: ``torch.func.functional_call``
    replaces parameters for one forward pass. A backward pass that brings the gradient
    of an exchanged parameter looks for strangers itself. For other backward passes,
    each stranger that is found before a forward pass or after ``load_state_dict`` gets
    a hook of its own. One case is not seen: the root module is never called, and all
    parameters are replaced at once, not by ``load_state_dict``.

    ``fully_shard`` itself puts whole parameters in the place of sharded ones while they
    are needed. These are no strangers: a stranger among sharded parameters is sharded
    too, or has a new name.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[NamedParam],
        give_up: Callable[[str], BaseException],
    ) -> None:
        self._forget = record_attached(model, params)
        self._ddp = model
        self._model = model
        self._give_up = give_up
        ignored: Collection[str] = ()
        if isinstance(model, DistributedDataParallel):
            self._model = model.module
            ignored = model.parameters_to_ignore
        self._sharded: dict[str, Any] = {}
        if sharded_modules(self._model):
            self._sharded = {
                name: p for name, p in self._model.named_parameters() if is_dtensor(p)
            }
        self._known: dict[int, Tensor] = {}
        self._frozen: list[Tensor] = []
        for name, param in self._model.named_parameters():
            if param.requires_grad or name in ignored:
                self._known[id(param)] = param
            else:
                self._frozen.append(param)
        self._armed: list[tuple[weakref.ref[Tensor], Any]] = []
        self._has_looked = False
        self._note()
        self._hooks = [
            # Before FSDP's hook, which puts whole parameters there: a look at the known
            # parameters takes less time.
            Hooked(model.register_forward_pre_hook, self._look, prepend=True),
            Hooked(
                self._model.register_load_state_dict_post_hook, lambda *_: self._arm()
            ),
        ]

    def remove(self) -> None:
        """Stops watching."""
        for hook in (*self._hooks, *(hook for _, hook in self._armed)):
            hook.remove()
        self._forget()

    def before_backward(self) -> None:
        """Raises on all ranks if the model has strangers as a backward pass begins."""
        if (not self._has_looked or self._armed) and (found := self._found()):
            raise self._error(found)
        self._has_looked = False

    def _look(self, module: nn.Module, args: Any) -> None:
        """Looks for strangers before a forward pass.

        It also refuses a forward pass within another DDP model that averages the same
        parameters.
        """
        if module is self._ddp and torch.is_grad_enabled():
            active = DistributedDataParallel._active_ddp_module
            if active is not None and active is not self._ddp:
                for name in exchanged_by(active, self._model.named_parameters()):
                    raise shown_as_around(name)
            self._has_looked = True
            self._arm()

    def _members(self) -> Iterator[object]:
        """The present parameters and submodules of the modules at the last note."""
        return chain(chain.from_iterable(self._held), (_END,))

    def _note(self) -> None:
        """Notes the model's modules, with the parameters that are in them now."""
        held = [h for m in self._model.modules() for h in (m._parameters, m._modules)]
        self._held = [one.values() for one in held]  # views, which show later changes
        self._noted = list(self._members())

    def _found(self) -> list[NamedParam]:
        """The strangers in the model, with their names."""
        if all(map(is_, self._members(), self._noted)) and not any(
            param.requires_grad for param in self._frozen
        ):
            return []
        params = list(self._model.named_parameters())
        found: list[NamedParam] = [
            (name, p)
            for name, p in params
            if p.requires_grad and p.is_leaf and id(p) not in self._known
            if not self._is_gathered(name, p)
        ]
        if not found and all(isinstance(p, nn.Parameter) for _, p in params):
            # functional_call's tensors are not noted: they would keep their graph
            self._note()
        return found

    def _is_gathered(self, name: str, param: Any) -> bool:
        """Whether FSDP has put a parameter in place of this name's sharded one."""
        own = self._sharded.get(name)
        return own is not None and not (
            is_dtensor(param) and param.device_mesh == own.device_mesh
        )

    def _arm(self) -> None:
        """Gives every stranger a hook that raises when a gradient comes to it."""
        for _, param in self._found():
            if not any(known() is param for known, _ in self._armed):
                self._armed.append((weakref.ref(param), on_gradient(param, self._trip)))

    def _trip(self, param: Tensor) -> None:
        """Raises if a parameter that has got a gradient is still a stranger."""
        found = self._found()
        if any(one is param for _, one in found):
            raise self._error(found)

    def _error(self, found: list[NamedParam]) -> BaseException:
        named = f"{found[0][0]}, ..." if len(found) > 1 else found[0][0]
        if any(found[0][1] is frozen for frozen in self._frozen):
            remedy = "attach again"
            if isinstance(self._ddp, DistributedDataParallel):
                remedy = (
                    "make the DistributedDataParallel anew from its module, then "
                    "attach that"
                )
            return self._give_up(
                f"{named} requires a gradient, which it did not when the model was "
                f"attached; call handle.detach() after unfreezing, {remedy}"
            )
        kind = type(found[0][1]).__name__
        return self._give_up(
            f"{named} (a {kind}; {len(found)} in all) came into the model after it was "
            "attached, by a new layer, load_state_dict(assign=True), parametrize, "
            "fully_shard or the like, so nobody exchanges its gradients; call "
            "handle.detach() before such a change, and attach after it"
        )


class Shrinks(Protocol):
    """Has training go on without lost ranks; see `shrink`.

    ``before_step`` is called before each step, and ``failed`` with the loss of a rank.
    """

    def before_step(self) -> None: ...

    def failed(self, failure: RankFailed) -> None: ...


class ModuleHooks:
    """Hands one plain module's gradients to the synchroniser, and ends its passes.

    At its end a backward pass waits for its means, or leaves that to ``overlap``. Then
    ``on_end`` is called, still inside backward(). While ``is_paused``, or while the
    model's ``require_backward_grad_sync`` is False, gradients accumulate on this rank
    and are not exchanged.
    """

    def __init__(
        self,
        progress: Progress,
        params: Sequence[NamedParam],
        overlap: DefersGradients | None,
        strangers: UnattachedParameters,
        local: LocalGradients,
    ) -> None:
        self._progress = progress
        self._synchroniser = progress.synchroniser
        self._synchroniser.counts_use = True
        self._local = local
        self.overlap = overlap
        self._strangers = strangers
        self.params = dict(params)
        self.on_end: Callable[[], None] | None = None
        self.shrinking: Shrinks | None = None
        """The way to go on without lost ranks; None where their loss ends the run."""
        self.is_paused = False
        self.switch: Mapping[str, object] = {}
        """The model's attributes; loops for DDP set ``require_backward_grad_sync``."""
        self.ends_behind_others = False
        """Whether callbacks at a backward pass's end bring gradients, as FSDP's do."""
        self._is_attached = True
        self._versions: dict[str, int] = {}
        """The parameters' versions as the step began, which show writes to them."""
        self._plain_dtypes = {
            name: param.dtype for name, param in params if not param.is_complex()
        }
        """The dtypes of gradients that messages can read without a conversion."""
        self._hooks = {
            name: on_gradient(param, self._accept, name) for name, param in params
        }

    def remove(self) -> None:
        """Hands in no further gradient."""
        self._is_attached = False
        for hook in self._hooks.values():
            hook.remove()

    def _accept(self, name: str, param: Tensor) -> None:
        """Takes the gradient that autograd has just accumulated."""
        if not self._is_attached:
            return
        engine = self._synchroniser.engine
        if engine.is_copy:
            engine.check()
        if self.is_paused or not self.switch.get("require_backward_grad_sync", True):
            if self.overlap is not None:
                self.overlap.take(name)
            # a pass that raised is repeated, first without an exchange
            if self._synchroniser.open and self._is_retry(name):
                self._do(self._synchroniser.abandon, name, is_retry=True)
            self._synchroniser.look(self._progress.step)
            self._local.keep(name, param)
            return
        try:
            progress = self._progress
            synchroniser = self._synchroniser
            is_under_way = synchroniser.open and progress.backward() is not None
            if not is_under_way or name in synchroniser.grads or self.overlap:
                with progress.opening:
                    if progress.is_leaving and progress.backward() is None:
                        return
                    self._begin_backward(name)
            self._hand_in(name, param)
        except RankFailed as failure:
            self._lost(failure)

    def _hand_in(self, name: str, param: Tensor) -> None:
        """Hands a gradient to the synchroniser, and says whether its memory is shared.

        Then other code may read the memory during the backward pass, so the mean is
        written there later. This code may be a hook of the user's that is called after
        this one. It may also be autograd itself: the gradient of a ``cat``'s input is a
        part of the gradient of its output, which other gradients may still need.
        """
        grad = param.grad
        if (
            grad.__class__ is not Tensor
            or grad.dtype is not self._plain_dtypes.get(name)
            or grad.layout is not torch.strided
        ):
            grad = self._expected(name, param)
        is_shared = False
        if grad is not None:
            hooks: Any = param._post_accumulate_grad_hooks
            is_last = next(reversed(hooks), None) == self._hooks[name].id
            is_shared = not is_last or (
                grad.layout is torch.strided
                and torch._C._storage_Use_Count(grad.untyped_storage()._cdata) != _ALONE
            )
        self._synchroniser.ready(name, grad, is_shared=is_shared)

    def _do(self, work: Callable[..., None], *operands: Any, **named: Any) -> None:
        """Does a part of a step, and handles the loss of a rank in it."""
        try:
            work(*operands, **named)
        except RankFailed as failure:
            self._lost(failure)

    def _lost(self, failure: RankFailed) -> None:
        """Goes on without a lost rank where this is possible, else raises.

        It also raises if the step has to be repeated.
        """
        if self.shrinking is None:
            raise failure
        self.shrinking.failed(failure)

    def _begin_backward(self, name: str) -> None:
        """Opens a step, if this is the first gradient of a backward pass."""
        if self.overlap is not None:
            self.overlap.take(name)
        synchroniser = self._synchroniser
        if synchroniser.open and (
            name in synchroniser.grads or self._progress.backward() is None
        ):
            synchroniser.abandon(name, is_retry=self._is_retry(name))
        if not synchroniser.open:
            # All attached models hand in the gradients that no hook has brought, before
            # any of them waits for its means.
            self._progress.queue_end(
                self._end,
                partial(self._do, self._complete),
                behind_others=self.ends_behind_others,
            )
            self._open_step()

    def _is_retry(self, name: str) -> bool:
        """Whether an earlier backward pass raised and the loop dropped its gradients.

        Means may still be written into the old gradients. So the pass can be repeated
        only with new gradients. ``name`` is the parameter with the first new gradient.
        """
        others = [param for own, param in self.params.items() if own != name]
        are_dropped = bool(others) and all(param.grad is None for param in others)
        return (
            self._progress.backward() is None and self.overlap is None and are_dropped
        )

    def _open_step(self) -> None:
        self._refuse_wrong_step()
        if self.shrinking is not None:
            self.shrinking.before_step()
        self._progress.begin_step()
        self._local.exchange()
        self._versions = {name: param._version for name, param in self.params.items()}

    @torch.no_grad()
    def backward_without_batch(self) -> None:
        """Makes a step in which this rank has no gradient.

        Every ``.grad`` is the mean then.
        """
        for param in self.params.values():
            param.grad = None
        is_retry = self._is_retry("")
        end = self._progress.ending(self._end)
        if self._synchroniser.open:
            self._synchroniser.abandon("a step without a batch", is_retry=is_retry)
        self._do(self._open_step)
        end()

    def _refuse_wrong_step(self) -> None:
        """Refuses a backward pass that must not begin a step, before any launch.

        The error is announced to the other ranks.
        """
        self._strangers.before_backward()
        if is_inside_a_segment():
            raise self._progress.give_up(
                "a backward pass began inside a segment of a reentrant activation "
                "checkpoint, where no step can end; use_reentrant=False is accepted"
            )
        # Compiled autograd calls nothing back at the end of a backward pass.
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if getattr(compiled, "in_compiled_autograd_region", False):
            raise self._progress.give_up(
                "compiled autograd runs this backward pass, whose end no hook can see; "
                "call backward() outside of what torch.compile compiles, or leave "
                "torch._dynamo.config.compiled_autograd False (the model may be "
                "compiled)"
            )

    def _expected(self, name: str, param: Tensor) -> Tensor | None:
        """The gradient in the form that messages read, converted on this rank alone.

        A sparse gradient is made dense if its module does not say ``sparse=True``.
        """
        grad = param.grad
        if grad is not None and grad.__class__ is not Tensor:
            grad = shard_of_grad(param)
        if grad is None:
            return None
        if grad.dtype != param.dtype:
            refuse_grad_dtype(name, param, grad.dtype)
        if grad.is_sparse and name not in self._synchroniser.row_sparse:
            # strided as the parameter
            grad = param.grad = torch.zeros_like(param).add_(grad)
        return self._as_reals(name, param, grad) if grad.is_complex() else grad

    def _as_reals(self, name: str, param: Tensor, grad: Tensor) -> Tensor:
        """The real view of a complex gradient, which ``.grad`` shows too."""
        shape = self._synchroniser.params[name].shape
        reals = grad_as_reals(grad, shape)
        if reals.data_ptr() == grad.data_ptr():
            return reals
        put_grad(param, reals)
        put = shard_of_grad(param)
        assert put is not None, "it was put there"
        return grad_as_reals(put, shape)

    def _complete(self) -> None:
        """Hands in ``.grad`` of parameters without a hook's call in this pass.

        It may hold a gradient that accumulated under ``no_sync``, which counts.
        """
        grads = self._synchroniser.grads
        if not self._synchroniser.open or self.params.keys() <= grads.keys():
            return
        handed_in = set(grads)
        for name, param in self.params.items():
            if name not in handed_in:
                self._hand_in(name, param)

    def _end(self) -> None:
        """Ends the step, as the backward pass ends."""
        self._do(self._finish)

    def _close(self) -> None:
        """Notes that all gradients of the step are there."""
        self._complete()
        self._refuse_stepped()
        self._synchroniser.close()
        self._progress.record_backward(wall_clock())

    def _finish(self) -> None:
        # the loss of a rank in another model's step has ended this one
        if not self._synchroniser.open:
            return
        self._close()
        if self.overlap is None:
            self._progress.finish()
        else:
            self.overlap.defer(
                {name: param.grad for name, param in self.params.items()}
            )
        if self.on_end is not None:
            self.on_end()

    def _refuse_stepped(self) -> None:
        """Refuses parameters that the backward pass has changed."""
        if self.overlap is not None:  # which steps them itself
            return
        versions = self._versions.items()
        stepped = [name for name, v in versions if self.params[name]._version != v]
        if stepped:
            raise self._progress.give_up(
                f"parameter {stepped[0]} changed during the backward pass "
                f"({len(stepped)} such), so a hook has stepped it with this rank's own "
                "gradient; step the optimizer after backward(), when the means are "
                "there"
            )


_ONE = torch.empty(1, device="cpu")
_ALONE: int = torch._C._storage_Use_Count(_ONE.untyped_storage()._cdata)
"""The use count of memory that belongs to one tensor only."""


def is_inside_a_segment() -> bool:
    """Whether this thread is in the nested backward pass of a reentrant checkpoint."""
    return frame_of(CheckpointFunction.backward.__code__) is not None
