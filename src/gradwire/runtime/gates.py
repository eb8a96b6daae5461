"""Gates: which parameters the forward pass is about to use, told just before it does.

A module that is called uses the parameters it owns. Some are used by a module above that never
calls their own (``nn.MultiheadAttention.out_proj``, ``nn.ParameterList``): which modules are called
is learnt from the passes before the first backward pass ends, when nothing can be pending yet, and
what a module owns that was not called belongs to the nearest module around it that was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Enter = Callable[[Sequence[str]], None]


class Gates:
    """Calls ``enter(names)`` before each module of ``model`` that uses parameters ``names``.

    ``ungated``, once ``close_lesson`` was called, are parameters that no called module holds.
    """

    def __init__(self, model: nn.Module, params: Mapping[str, Tensor], enter: Enter) -> None:
        self._model, self._enter = model, enter
        self._names = {param: name for name, param in params.items()}
        self._called: set[nn.Module] = set()
        self.ungated: tuple[str, ...] = ()
        self.is_learning = True
        self._hooks = [
            module.register_forward_pre_hook(self._note(), prepend=True)
            for module in model.modules()
        ]

    def _note(self) -> Callable[[nn.Module, Any], None]:
        called = self._called

        def note(module: nn.Module, args: Any) -> None:
            # Without gradients a module may take a short cut past the modules it holds.
            if torch.is_grad_enabled():
                called.add(module)

        return note

    def close_lesson(self) -> None:
        """From now on the gates stand where the modules that were called so far need them."""
        self.remove()
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
        self._hooks = [
            module.register_forward_pre_hook(self._gate(module, names), prepend=True)
            for module, names in names_of.items()
        ]
        self._called.clear()

    def _user(self, modules: Mapping[str, nn.Module], path: str) -> nn.Module | None:
        """The module at ``path`` or the nearest around it that was called."""
        while modules[path] not in self._called:
            if not path:
                return None
            path = path.rpartition(".")[0]
        return modules[path]

    def _gate(self, gated: nn.Module, names: Sequence[str]) -> Callable[[nn.Module, Any], None]:
        # A plain function: a copy of the model must not copy what a bound method is bound to.
        enter, own = self._enter, tuple(dict.fromkeys(names))

        def gate(module: nn.Module, args: Any) -> None:
            if module is gated:  # and not a copy of it
                enter(own)

        return gate

    def remove(self) -> None:
        """Takes the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def parameters_behind(output: Any) -> set[Tensor]:
    """The leaves that a backward pass from any tensor in ``output`` would reach."""
    stack = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    seen: set[Any] = {None}
    found: set[Tensor] = set()
    while stack:
        node = stack.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        stack += [function for function, _ in node.next_functions]
        if hasattr(node, "variable"):
            found.add(node.variable)
    return found
