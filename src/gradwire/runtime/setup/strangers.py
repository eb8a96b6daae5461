"""Strangers: parameters that came into a model after attach, which nobody exchanges.

``load_state_dict(assign=True)``, a new head, ``parametrize`` and ``fully_shard`` put other
parameters in the place of those that are exchanged, and every rank would train its own. A look at a
model without strangers compares the objects in its modules, one by one, with those at attach: about
25 us for 400 parameters, once a step.

A stranger is not an error before a gradient comes to it: ``torch.func.functional_call`` puts other
parameters' place for one forward pass. So strangers that are found in the forward pass or after
``load_state_dict`` get a hook of their own, for a backward pass in which no parameter that is
exchanged gets a gradient. One case is not seen: all parameters of a model whose root is never
called are replaced at once, and not by ``load_state_dict``.

``fully_shard`` itself puts whole parameters in the place of sharded ones while they are needed.
These are no strangers: a stranger among sharded parameters is sharded too, or has a new name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..grid.dtensors import is_dtensor, sharded_modules
from ..step.hooked import Hooked
from .refusals import exchanged_by, shown_as_around

_END = object()


class Strangers:
    """Watches one model from its attach on.

    ``give_up(text)`` fails on behalf of this rank, tells the others, and returns the error.
    """

    def __init__(self, model: nn.Module, give_up: Callable[[str], BaseException]) -> None:
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._ddp, self._give_up = model, give_up
        ignored = model.parameters_to_ignore if isinstance(model, DistributedDataParallel) else ()
        self._sharded: dict[str, Any] = {}
        if sharded_modules(self._model):
            self._sharded = {name: p for name, p in self._model.named_parameters() if is_dtensor(p)}
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
            # Before FSDP's hook, which gathers parameters: a look takes less where they are known.
            Hooked(model.register_forward_pre_hook, self._before_forward(), prepend=True),
            Hooked(self._model.register_load_state_dict_post_hook, lambda *_: self._arm()),
        ]

    def remove(self) -> None:
        """Stops watching."""
        for hook in (*self._hooks, *(hook for _, hook in self._armed)):
            hook.remove()

    def before_backward(self) -> None:
        """Raises, on all ranks, if the model has strangers when a backward pass begins."""
        if (not self._has_looked or self._armed) and (found := self._found()):
            raise self._error(found)
        self._has_looked = False

    def _before_forward(self) -> Callable[[nn.Module, Any], None]:
        def before(module: nn.Module, args: Any) -> None:
            if module is self._ddp and torch.is_grad_enabled():
                self._refuse_active_ddp()
                self._has_looked = True
                self._arm()

        return before

    def _refuse_active_ddp(self) -> None:
        """Refuses a forward pass inside of another DDP that exchanges these parameters."""
        active = DistributedDataParallel._active_ddp_module
        if active is not None and active is not self._ddp:
            for name in exchanged_by(active, self._model.named_parameters()):
                raise shown_as_around(name)

    def _members(self) -> Iterator[object]:
        """The parameters and modules that the modules at the last note hold now."""
        return chain(chain.from_iterable(self._held), (_END,))

    def _note(self) -> None:
        held = [h for m in self._model.modules() for h in (m._parameters, m._modules)]
        self._held = [one.values() for one in held]  # views, which show later changes
        self._noted = list(self._members())

    def _found(self) -> list[tuple[str, Tensor]]:
        """The strangers in the model, with their names."""
        if all(map(is_, self._members(), self._noted)) and not _any_requires_grad(self._frozen):
            return []
        params = list(self._model.named_parameters())
        found = [
            (name, p)
            for name, p in params
            if p.requires_grad and p.is_leaf and id(p) not in self._known
            if not self._is_gathered(name, p)
        ]
        if not found and all(isinstance(p, nn.Parameter) for _, p in params):
            self._note()  # and never what functional_call has put there, with its graph
        return found

    def _is_gathered(self, name: str, param: Any) -> bool:
        """Whether FSDP has put a parameter in the place of the sharded one of this name."""
        own = self._sharded.get(name)
        return own is not None and not (is_dtensor(param) and param.device_mesh == own.device_mesh)

    def _arm(self) -> None:
        """Gives every stranger a hook that raises when a gradient comes to it."""
        for _, param in self._found():
            if not any(known() is param for known, _ in self._armed):
                self._armed.append((weakref.ref(param), self._tripwire(param)))

    def _tripwire(self, param: Any) -> Any:
        # The garbage collector does not see what a parameter's hook refers to.
        this = weakref.ref(self)

        def trip(param: Tensor) -> None:
            strangers = this()
            found = [] if strangers is None else strangers._found()
            if strangers is not None and any(one is param for _, one in found):
                raise strangers._error(found)

        return param.register_post_accumulate_grad_hook(trip)

    def _error(self, found: list[tuple[str, Tensor]]) -> BaseException:
        named = f"{found[0][0]}, ..." if len(found) > 1 else found[0][0]
        if any(found[0][1] is frozen for frozen in self._frozen):
            return self._give_up(
                f"{named} requires a gradient, which it did not when the model was attached; "
                "detach and attach again after unfreezing"
            )
        kind = type(found[0][1]).__name__
        return self._give_up(
            f"{named} (a {kind}; {len(found)} in all) came into the model after it was attached, "
            "by a new layer, load_state_dict(assign=True), parametrize, fully_shard or the like, "
            "so nobody exchanges its gradients; call handle.detach() before such a change, and "
            "attach after it"
        )


def _any_requires_grad(params: Iterable[Tensor]) -> bool:
    return any(param.requires_grad for param in params)
