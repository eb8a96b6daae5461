"""Hooked: hooks in a module that its copies, pickles and compiled forms lack.

``copy.deepcopy(model)`` and ``torch.save(model)`` take a module's hooks along, and
those of an attached model lead to threads and connections. So a module that has such
hooks gets a ``__getstate__`` of its own, which leaves them out: its copies are not
attached. Nor does ``torch.compile`` trace into these hooks, as they compute nothing of
the model.
"""

import functools
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import nn

_OWN = "__getstate__"
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Object = TypeVar("_Object")


def untraced(function: _Function) -> _Function:
    """The same function, which runs as it stands where a compiled function calls it.

    Dynamo's own ``skip`` marks a function so too, but its import takes 2 to 8 s.
    """
    marked: Any = getattr(function, "__func__", function)  # a bound method's function
    if not _is_skipped(marked.__code__):
        disabled: _Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled
    marked._torchdynamo_disable = True
    return function


OBSERVES = "_gradwire_observes"
"""The mark of an optimizer's hook in spite of which a step may be cut into layers."""


def observing(function: _Function) -> _Function:
    """An optimizer's hook that changes nothing of models that others attached."""
    hook = untraced(function)
    setattr(hook, OBSERVES, True)
    return hook


@functools.cache
def _is_skipped(code: CodeType) -> bool:
    """Has dynamo skip ``code`` and all that it calls.

    Returns whether torch has a way to say so.
    """
    frames: Any = torch._C._dynamo.eval_frame
    try:
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    except (AttributeError, TypeError):  # another torch
        return False
    return True


def frame_of(code: CodeType) -> FrameType | None:
    """The innermost frame of this thread that runs ``code``; None without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def living(kind: type[_Object]) -> list[_Object]:
    """The objects of a class that the garbage collector knows.

    Each refers to its class. Their classes are asked, as an object may call itself
    another one's. Asking all objects would write to each one's count of references:
    a forked process would copy all of its memory.
    """
    kinds = {kind}
    while more := {s for one in kinds for s in type.__subclasses__(one)} - kinds:
        kinds |= more
    return [one for one in gc.get_referrers(*kinds) if type(one) in kinds]


def params_of(optimizer: Any) -> list[Any]:
    """The parameters of all groups of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def is_in_backward() -> bool:
    """Whether this thread is in a backward pass."""
    return torch._C._current_graph_task_id() != -1


class Hooked:
    """One hook of a module, until ``remove`` is called.

    ``register`` is a method of the module, such as ``model.register_forward_hook``.
    """

    def __init__(
        self, register: Any, hook: Callable[..., Any], **settings: Any
    ) -> None:
        self._module: nn.Module = register.__self__
        self._hook = register(untraced(hook), **settings)
        state = vars(self._module).setdefault(_OWN, _StateWithoutHooks(self._module))
        state.ids.add(self._hook.id)

    def remove(self) -> None:
        """Removes the hook.

        After the last one the module is as it was before the first.
        """
        self._hook.remove()
        state = vars(self._module).get(_OWN)
        if isinstance(state, _StateWithoutHooks):
            state.ids.discard(self._hook.id)
            if not state.ids:
                del vars(self._module)[_OWN]


class TemporaryAttribute:
    """A module's attribute until ``remove`` is called, which copies do not have.

    The module has a hook of ``Hooked``, and keeps it for as long.
    """

    def __init__(self, module: nn.Module, name: str, value: object) -> None:
        self._module = module
        self._name = name
        vars(module)[name] = value
        vars(module)[_OWN].names.add(name)

    def remove(self) -> None:
        """Takes it back; what the module's class has under the name shows again."""
        vars(self._module).pop(self._name, None)


class _StateWithoutHooks:
    """A module's ``__getstate__`` for copies and pickles, without the hooks ``ids``.

    Attributes ``names``, in place of methods, are left out too.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.ids: set[int] = set()
        self.names = {_OWN}

    def __call__(self) -> Any:
        kind: Any = type(self._module)
        state = kind.__getstate__(self._module)
        if not isinstance(state, dict):
            return state
        kept = {name: value for name, value in state.items() if name not in self.names}
        for name, value in kept.items():
            if name.endswith("_hooks") and isinstance(value, OrderedDict):
                left = [
                    (key, hook) for key, hook in value.items() if key not in self.ids
                ]
                kept[name] = OrderedDict(left)
        return kept
