"""Gates: hooks that name the parameters which a module is about to use, just before it runs.

A module that is called uses the parameters it owns. Some parameters are used by a module above that
never calls their own module (``nn.MultiheadAttention.out_proj``, ``nn.ParameterList``). So gates
learn which modules are called from the passes before the first backward pass ends, when nothing
can be pending yet. The parameters of a module that was not called belong to the nearest module
around it that was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..step.hooked import Hooked

Enter = Callable[[Sequence[str]], None]


class Gates:
    """Calls ``enter(names)`` before each module of ``model`` that uses parameters ``names``.

    ``ungated``, once ``close_lesson`` was called, are parameters that no called module holds.
    """

    def __init__(self, model: nn.Module, params: Mapping[str, Tensor], enter: Enter) -> None:
        self._model, self._enter = model, enter
        self._names = {param: name for name, param in params.items()}
        self._called: set[nn.Module] = set()
        self._names_of: dict[nn.Module, tuple[str, ...]] = {}
        self.ungated: tuple[str, ...] = ()
        self.is_learning = True
        self._hooks = {
            module: Hooked(module.register_forward_pre_hook, self._gate(module), prepend=True)
            for module in model.modules()
        }

    def close_lesson(self) -> None:
        """Ends the learning: from now on gates stand only before modules that need them."""
        self.is_learning = False
        names_of: dict[nn.Module, list[str]] = {}
        ungated: list[str] = []
        modules = dict(self._model.named_modules(remove_duplicate=False))
        for path, module in modules.items():
            user = self._user(modules, path)
            for param in module._parameters.values():
                name = None if param is None else self._names.get(param)
                if name is not None:
                    (ungated if user is None else names_of.setdefault(user, [])).append(name)
        self.ungated = tuple(dict.fromkeys(ungated))
        self._names_of = {module: tuple(dict.fromkeys(own)) for module, own in names_of.items()}
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
            if module is not gated:  # but a copy of it that has its hooks all the same
                return
            if not self.is_learning:
                self._enter(self._names_of[module])
            elif torch.is_grad_enabled():  # without gradients a module may pass by those it holds
                self._called.add(module)

        return gate

    def remove(self, *modules: nn.Module) -> None:
        """Removes the hooks of ``modules``, or of all modules if none is named."""
        for module in modules or tuple(self._hooks):
            self._hooks.pop(module).remove()
