"""Overlap: the next forward pass begins while the last means still arrive.

At the end of backward ``defer`` puts a `PendingGrad` in the place of every ``.grad``
and returns. ``optimizer.step()`` notes its hyper-parameters, makes each parameter a
`PendingParameter` and returns. Before a module runs, its gate waits for the means of
that module's parameters alone and makes their part of the step; other parameters whose
means have arrived are updated along with them.

Code that needs a value earlier settles the step: all means are waited for, plain
gradients are put in place, and the rest of the step is made. These settle it: a look at
a gradient; a look at a parameter that waits for its update, or a change of it (an
average of weights, ``p.data.clamp_()``, ``copy.deepcopy(model)``); a closure; step
hooks; an optimizer that cannot be cut; ``state_dict`` and ``load_state_dict`` of model
and optimizer. Such a fall-back is counted, and logged once for each reason. A parameter
that the forward pass uses without calling its module waits for its own mean alone. So
training is the same, bit for bit, whatever the user does.

Between ``optimizer.step()`` and the next forward pass some looks cannot be seen: at the
optimizer's ``state``, through a view that was taken before (``held = p.data``), or from
C++. Call ``handle.synchronize()`` before them. Where autograd notices such a look (a
write through ``p.detach()``, a use in a forward pass), the run ends with an error.
"""

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import InvalidSetting, log
from ..step.hooked import Hooked, is_in_backward, untraced
from ..step.progress import Progress
from .pending import (
    PendingGrad,
    PendingPass,
    pending,
    pending_parameters,
    stands_for,
    unfit,
)
from .stepping import LayerwiseStep, StepRequest, in_autocast, replace_step

Enter = Callable[[Sequence[str]], None]


class Gates:
    """Calls ``enter(names)`` before each module of ``model`` that uses ``names``.

    A module that is called uses the parameters it owns. Some parameters are used by a
    module above that never calls their own module (``nn.MultiheadAttention.out_proj``,
    ``nn.ParameterList``). So gates learn which modules are called from the passes
    before the first backward pass ends, when nothing can be pending yet. The parameters
    of a module that was not called belong to the nearest module around it that was.
    ``ungated``, once ``close_lesson`` was called, are parameters that no called module
    holds.
    """

    def __init__(
        self, model: nn.Module, params: Mapping[str, Tensor], enter: Enter
    ) -> None:
        self._model = model
        self._enter = enter
        self._names = {param: name for name, param in params.items()}
        self._called: set[nn.Module] = set()
        self._names_of: dict[nn.Module, tuple[str, ...]] = {}
        self.ungated: tuple[str, ...] = ()
        self.is_learning = True
        self._hooks = {
            module: Hooked(
                module.register_forward_pre_hook, self._gate(module), prepend=True
            )
            for module in model.modules()
        }

    def close_lesson(self) -> None:
        """Ends the learning: gates now stand only before modules that need them."""
        self.is_learning = False
        names_of: dict[nn.Module, list[str]] = {}
        ungated: list[str] = []
        modules = dict(self._model.named_modules(remove_duplicate=False))
        for path, module in modules.items():
            user = self._user(modules, path)
            names = ungated if user is None else names_of.setdefault(user, [])
            for param in module._parameters.values():
                if param is not None and param in self._names:
                    names.append(self._names[param])
        self.ungated = tuple(dict.fromkeys(ungated))
        self._names_of = {
            module: tuple(dict.fromkeys(names))
            for module, names in names_of.items()
            if names
        }
        self.remove(*self._hooks.keys() - self._names_of.keys())
        self._called.clear()

    def _user(self, modules: Mapping[str, nn.Module], path: str) -> nn.Module | None:
        """The module at ``path`` or the nearest around it that was called."""
        while modules[path] not in self._called:
            if not path:
                return None
            path = path.rpartition(".")[0]
        return modules[path]

    def _gate(self, gated: nn.Module) -> Callable[[nn.Module, Any], None]:
        def gate(module: nn.Module, args: Any) -> None:
            # a copy of the module has its hooks all the same
            if module is not gated:
                return
            if not self.is_learning:
                self._enter(self._names_of[module])
            # without gradients a module may bypass the modules inside it
            elif torch.is_grad_enabled():
                self._called.add(module)

        return gate

    def remove(self, *modules: nn.Module) -> None:
        """Removes the hooks of ``modules``, or of all modules if none is named."""
        for module in modules or tuple(self._hooks):
            self._hooks.pop(module).remove()


class Overlap:
    """Overlaps the exchange of ``params`` of ``model`` with its next forward pass.

    The hooks of the backward pass call ``take`` at each of its gradients, and ``defer``
    at its end. ``num_overlapped`` counts backward passes whose means could be on their
    way until the next one began. ``fallbacks`` counts, by reason, backward passes that
    had to be settled earlier.

    Some parameters may be in no group of ``optimizer``, and it may have others, which
    are updated within ``step()``. A second optimizer looks at pending gradients, and so
    settles the step: overlap needs one optimizer for all parameters that are exchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[tuple[str, Tensor]],
        optimizer: Optimizer,
        progress: Progress,
    ) -> None:
        self._params = dict(params)
        self._names = {param: name for name, param in params}
        self._optimizer = optimizer
        self._progress = progress
        self._lock = threading.RLock()  # autograd has one thread a device
        self.is_open = False
        """Whether means or updates of the last backward pass may be pending."""
        self._grads: dict[str, Tensor] = {}
        self._asked: StepRequest | None = None
        self._due: dict[str, int] = {}
        """The version of each parameter whose update was asked for and is not made."""
        self._late: set[str] = set()
        self._pending_class = pending_parameters(self._look())
        odd = [
            f"{n} is a {type(p).__name__}"
            for n, p in params
            if type(p) is not nn.Parameter
        ]
        self._odd = f"{odd[0]}, of which no stand-in can be made" if odd else None
        self._in_forward = False
        self._pass = self._new_pass()
        self.num_overlapped = 0
        self.fallbacks: Counter[str] = Counter()
        self._stepper = LayerwiseStep(optimizer)
        self._gates = Gates(model, self._params, self._enter)
        self._undo = ExitStack()
        self._undo.callback(self._gates.remove)
        self._whole_step, put_back = replace_step(optimizer, self._step)
        self._undo.callback(put_back)
        for hook in self._hooks(model, optimizer):
            self._undo.callback(hook.remove)

    def _hooks(self, model: nn.Module, optimizer: Optimizer) -> Iterable[Any]:
        """Hooks at the root forward's begin and end, and at state's read and write."""

        def settle(*_: Any) -> None:
            self.settle(None)

        def enter(module: nn.Module, args: Any) -> None:
            if module is model:  # and not a copy of it
                self._in_forward = torch.is_grad_enabled()
                if self._due and not self._in_forward:
                    self._settle_for_evaluation()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if module is model:
                self._in_forward = False

        yield Hooked(model.register_forward_pre_hook, enter, prepend=True)
        yield Hooked(model.register_forward_hook, leave)
        for module in model.modules():
            yield Hooked(module.register_state_dict_pre_hook, settle)
            yield Hooked(module.register_load_state_dict_pre_hook, settle)
        yield optimizer.register_state_dict_pre_hook(settle, prepend=True)
        yield optimizer.register_load_state_dict_pre_hook(settle, prepend=True)

        def settled(state: Callable[[], Any] = optimizer.__getstate__) -> Any:
            self.settle(None)
            return state()

        vars(optimizer)["__getstate__"] = settled
        self._undo.callback(vars(optimizer).pop, "__getstate__", None)

    # Backward.

    def take(self, name: str) -> None:
        """Settles the last backward pass, as the next one's gradient ``name`` is there.

        Raises if that parameter was used before its update was made.
        """
        self._begin_backward()
        if name in self._late:
            raise self._progress.give_up(
                f"{name} was used in the forward pass before its update was made: its "
                "module was not called, as it was in the first step, and it was used "
                "through a view that was taken before, or from C++. Call the module "
                "that owns it, call handle.synchronize() before the forward pass, or "
                "attach with optimizer=None, which does not overlap the forward pass"
            )

    def _begin_backward(self) -> None:
        if self.is_open:
            with self._lock:
                late = set(self._due)
                self.settle(None)
                self._late |= late
                self.num_overlapped += 1

    def defer(self, grads: Mapping[str, Tensor | None]) -> None:
        """Makes ``grads`` pending at the end of backward.

        They are by name; None took no part.
        """
        assert not self.is_open, "no gradient was taken"
        if self._gates.is_learning:
            self._gates.close_lesson()
            if self._gates.ungated:
                log.warning(
                    "optimizer.step() waits for the gradients of %d parameters (%s, "
                    "...): in the first step neither the module that owns them nor any "
                    "around it was called, so nothing tells when they will be used; "
                    "call the module to overlap them too",
                    len(self._gates.ungated),
                    self._gates.ungated[0],
                )
        self._late.clear()
        self._asked = None
        self._due = {}
        self.is_open = True
        reason = self._stepper.refusal() or self._odd or unfit(grads)
        if reason is not None:
            self.settle(reason)
            return
        self._pass = self._new_pass()
        self._grads = {name: grad for name, grad in grads.items() if grad is not None}
        for name, grad in self._grads.items():
            self._params[name].grad = pending(grad, self._pass)

    def _new_pass(self) -> PendingPass:
        # Python's garbage collector does not see a gradient's references.
        this = weakref.ref(self)

        def settle(looker: str) -> None:
            overlap = this()
            if overlap is None:
                raise InvalidSetting(
                    "this gradient never arrived: its model was dropped while it was "
                    "on its way; call handle.synchronize() before the model is dropped"
                )
            overlap._looked_at(looker)

        return PendingPass(settle)

    def _looked_at(self, looker: str) -> None:
        """Settles the step, as somebody needs the value of a pending gradient."""
        if is_in_backward():
            self._begin_backward()  # autograd adds the next gradient to it
        else:
            self.settle(f"{looker} used gradients before the next forward pass")

    def _look(self) -> Callable[[Tensor, str], None]:
        """A function to call when a parameter with a pending update is needed."""
        this = weakref.ref(self)

        def look(param: Tensor, looker: str) -> None:
            overlap = this()
            if overlap is None:
                param.__class__ = nn.Parameter
                raise InvalidSetting(
                    "this parameter's last update was never made: its model was "
                    "dropped while the gradient was on its way; call "
                    "handle.synchronize() before the model is dropped"
                )
            with overlap._lock:
                if overlap._in_forward or is_in_backward():
                    overlap._bring([overlap._names[param]])
                else:
                    overlap.settle(
                        f"{looker} used parameters before the next forward pass"
                    )

        return untraced(look)

    # The step.

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """The function in place of ``optimizer.step`` while the model is attached."""
        with self._lock:
            if not self.is_open:
                return self._whole_step(*args, **kwargs)
            reason = self._why_whole(args, kwargs)
            if reason is not None:
                self.settle(reason)
                return self._whole_step(*args, **kwargs)
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # for lr_scheduler
            self._ask()
            return None

    def _why_whole(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> str | None:
        if any(argument is not None for argument in (*args, *kwargs.values())):
            return "step(closure) must run forward and backward itself"
        if self._asked is not None:
            return "step() was called twice after one backward pass"
        if in_autocast():
            return "step() was called inside autocast"
        return self._stepper.refusal()

    def _ask(self) -> None:
        """Notes the step for pending gradients, and makes it for the others."""
        asked = self._stepper.record()
        due = {}
        plain = []
        for param in asked.group_of:
            grad = param.grad
            name = self._names.get(param, "")
            if grad is None:
                continue
            if name and stands_for(grad, self._grads[name]):
                due[name] = param._version
            elif isinstance(grad, PendingGrad):
                self._step_with_foreign(param, grad)
                return
            else:
                plain.append(param)
        self._in_forward = False  # of one that raised
        self._asked = asked
        self._due = {name: due[name] for name in self._params if name in due}
        for name in self._due:
            self._params[name].__class__ = self._pending_class
        if plain:
            self._stepper.apply(asked, plain)
        self._bring(self._gates.ungated)

    def _step_with_foreign(self, param: Tensor, grad: PendingGrad) -> None:
        """Makes the whole step, in which is a gradient that no wait of ours is for."""
        reason = "the optimizer has pending gradients of another model or parameter"
        self.settle(reason)
        if not grad.of_pass.is_over:
            grad.of_pass.settle(reason)
        param.grad = grad.plain
        self._whole_step()

    def _make(self, names: Sequence[str]) -> None:
        """Makes the step for parameters whose means have arrived."""
        assert self._asked is not None
        params = [self._params[name] for name in names]
        self._show_parameters(names)
        for name, param in zip(names, params, strict=True):
            if param._version != self._due[name]:
                raise self._progress.give_up(
                    f"{name} was written between optimizer.step() and its update, "
                    "which was still on its way; call handle.synchronize() after "
                    "step() and before the change, or attach with optimizer=None, "
                    "which does not overlap the forward pass"
                )
        shown = [param.grad for param in params]
        for name, param in zip(names, params, strict=True):
            param.grad = self._grads[name]
        try:
            self._stepper.apply(self._asked, params)
        finally:
            for param, grad in zip(params, shown, strict=True):
                if not isinstance(grad, PendingGrad):
                    # None, or a gradient that the user put there since
                    param.grad = grad
        for name in names:
            del self._due[name]
            # the gradient is free, if the user let go of it
            del self._grads[name]

    # Forward.

    def _enter(self, names: Sequence[str]) -> None:
        """Brings parameters ``names`` up to date, as a module will use them."""
        if not self._due:
            return
        with self._lock:
            if not (self._in_forward or torch.is_grad_enabled()):
                self._settle_for_evaluation()
            self._bring(names)

    def _bring(self, names: Sequence[str]) -> None:
        """Makes the step for ``names``, and for others whose means have arrived."""
        mine = [name for name in names if name in self._due]
        if mine:
            self._progress.wait(mine)
            others = self._arrived(set(mine))
            self._progress.synchroniser.follow(others)
            self._make(mine + others)

    def _arrived(self, known: set[str]) -> list[str]:
        """Due parameters beside ``known``, in order, until one lacks its mean."""
        arrived = []
        for name in self._due:
            if name not in known:
                if not self._progress.synchroniser.arrived(name):
                    break
                arrived.append(name)
        return arrived

    def _settle_for_evaluation(self) -> None:
        """Makes all updates: a forward pass without gradients may skip modules."""
        self.settle(
            "a forward pass without gradients needs all updates", level=logging.INFO
        )

    # Settling.

    def settle(self, reason: str | None, *, level: int = logging.WARNING) -> None:
        """Waits for all means, puts plain gradients in place and makes the due step.

        ``reason`` says why the forward pass cannot be overlapped; with None nothing is
        counted, as for a call of ``synchronize()``. Raises ``RankFailed`` if a peer is
        lost. Does nothing if nothing is pending.
        """
        with self._lock:
            if not self.is_open:
                return
            if reason is not None:
                self.fallbacks[reason] += 1
                if self.fallbacks[reason] == 1:
                    log.log(
                        level,
                        "the next forward pass does not overlap the exchange: %s; "
                        "results are the same, the step takes as long as without "
                        "overlap (attach with optimizer=None if you do not need it)",
                        reason,
                    )
            self._progress.finish()
            if self._due:
                self._make(list(self._due))
            # plain ones for pending ones still there
            for name, grad in self._grads.items():
                if stands_for(self._params[name].grad, grad):
                    self._params[name].grad = grad
            self._pass.is_over = True
            self._grads = {}
            self.is_open = False

    def _show_parameters(self, names: Iterable[str]) -> None:
        for name in names:
            self._params[name].__class__ = nn.Parameter

    def detach(self) -> None:
        """Settles the step and removes all hooks, which go even if settling raises."""
        with self._undo:
            self._undo.callback(self._show_parameters, self._due)
            self.settle(None)
