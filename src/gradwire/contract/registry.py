"""The folder listing is the registry: ``compress/topk.py`` defines ``topk``, and that is all.

An algorithm with helpers of its own is a room: ``compress/deft/``. Files that start with an
underscore are support and bear no public name.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import UnknownName, invalid

KINDS = {
    "compress": "compressor",
    "collective": "collective",
    "planner": "planner",
    "pilot": "pilot",
    "sparse.formats": "sparse format",
}
"""Packages that are registries, and what one of their files is called."""


@cache
def names(kind: str) -> tuple[str, ...]:
    """Names of all files of a kind, ascending.

    >>> "topk" in names("compress")
    True
    """
    if kind not in KINDS:
        raise invalid("kind", kind, f"one of {', '.join(KINDS)}", "ask for one of these")
    folder = Path(__file__).parent.joinpath(*kind.split("."))
    files = [path.stem for path in folder.glob("*.py")]
    rooms = [path.parent.name for path in folder.glob("*/__init__.py")]
    return tuple(sorted(name for name in (*files, *rooms) if not name.startswith("_")))


def load(kind: str, name: str) -> Any:
    """The object that the file ``name`` of folder ``kind`` defines under its own name."""
    if name not in names(kind):
        raise UnknownName(KINDS[kind], name, names(kind))
    module = importlib.import_module(f"gradwire.{kind}.{name}")
    return getattr(module, name)


def examples(kind: str) -> tuple[Any, ...]:
    """All settings that the files of a kind list in their ``EXAMPLES``."""
    modules = (importlib.import_module(f"gradwire.{kind}.{name}") for name in names(kind))
    return tuple(example for module in modules for example in module.EXAMPLES)


class Registry(ModuleType):
    """A package whose attributes are what its files define: ``compress.topk`` is the class.

    Python binds an imported file to its package under the file's name; here the class of that name
    is bound instead, whichever way the file was imported first.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = load(self.__name__.partition(".")[2], name)
        setattr(self, name, found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and hasattr(value, name):
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return list(names(self.__name__.partition(".")[2]))


def make_registry(package: str) -> None:
    """Turns an imported package into a ``Registry``; called by its ``__init__``."""
    sys.modules[package].__class__ = Registry
