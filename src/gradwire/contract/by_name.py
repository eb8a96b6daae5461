"""Settings are given by name: ``topk(density=0.01)``; errors say so, with the names there are."""

from __future__ import annotations

from abc import ABCMeta
from dataclasses import is_dataclass
from inspect import CO_VARARGS, CO_VARKEYWORDS, Signature, signature
from typing import TYPE_CHECKING, Any

from ..errors import UnknownName, invalid


class KeywordSettings(ABCMeta):
    """The kind of classes of algorithms, which are keyword-only dataclasses of their settings.

    A setting without its name, or by a name that there is not, is refused as ``InvalidSetting``.
    Classes that are no such dataclasses take what they like.
    """

    if not TYPE_CHECKING:  # which knows each dataclass's own arguments

        def __call__(cls, *args: Any, **settings: Any) -> Any:
            known = _names(cls)
            if known is not None and args:
                accepted = f"given by name ({', '.join(known)})" if known else "left out"
                first = f"{known[0]}={args[0]!r}" if known else ""
                remedy = f"write {cls.__name__}({first})"
                raise invalid(f"settings of {cls.__name__}", args, accepted, remedy)
            if known is not None and (unknown := [name for name in settings if name not in known]):
                raise UnknownName(f"setting of {cls.__name__}", unknown[0], known)
            return super().__call__(*args, **settings)

    @property
    def __signature__(cls) -> Signature:
        """The settings themselves, which ``help`` and pages would else not see behind a call."""
        whole: Any = cls.__init__  # type: ignore[misc]
        found = signature(whole)
        return found.replace(parameters=[*found.parameters.values()][1:])


def _names(cls: type) -> list[str] | None:
    """A class's settings, its own before those that bases have; None if it is not of that form."""
    if not is_dataclass(cls) or "__init__" not in vars(cls):
        return None
    code = getattr(vars(cls)["__init__"], "__code__", None)
    if code is None or code.co_argcount != 1 or code.co_flags & (CO_VARARGS | CO_VARKEYWORDS):
        return None
    found = code.co_varnames[1 : 1 + code.co_kwonlyargcount]
    inherited = {name for base in cls.__mro__[1:] for name in vars(base).get("__annotations__", {})}
    return sorted(found, key=lambda name: name in inherited)
