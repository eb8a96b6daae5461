"""Docstrings name every argument: of the names at the root and of all algorithms."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from enum import EnumMeta
from inspect import Parameter
from typing import Any

import gradwire as gw
from gradwire.contract.registry import KINDS, load, names
from tests.each import each

RETURNED = frozenset({gw.Handle})
"""Classes that only gradwire makes. Their docstrings list attributes."""
WRITTEN = frozenset({"schema_version"})
"""Entries of a file that no caller passes."""
SECTION = re.compile(r"^([A-Z]\w+):\n((?: {4}.*\n|\n)+)", re.M)
ENTRY = re.compile(r"^ {4}(\w+): \S", re.M)


def described(docstring: str, section: str) -> list[str]:
    """The names that a section of a docstring explains, in order."""
    for title, body in SECTION.findall(f"{docstring}\n"):
        if title == section:
            return ENTRY.findall(body)
    return []


def arguments(documented: Any) -> list[str]:
    """The arguments of a function or class that a caller may pass by name."""
    various = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    try:
        found = inspect.signature(documented).parameters.values()
    except ValueError:  # an exception without an __init__ of its own
        return []
    return [
        one.name
        for one in found
        if one.kind not in various and one.name not in WRITTEN
    ]


def unexplained(documented: Any) -> list[str]:
    """The arguments that the docstring does not explain.

    A class that inherits ``__init__`` inherits its ``Args:`` too. An enumeration has
    members in the place of arguments.
    """
    if isinstance(documented, EnumMeta):
        wanted = [*documented.__members__]
        section = "Attributes"
    else:
        wanted = arguments(documented)
        section = "Args"
    home = documented
    if inspect.isclass(documented):
        home = next(
            (one for one in documented.__mro__ if "__init__" in vars(one)), documented
        )
    explained = {
        name
        for one in (documented, home)
        for name in described(inspect.getdoc(one) or "", section)
    }
    return [name for name in wanted if name not in explained]


def at_the_root() -> Iterator[tuple[str, Any]]:
    for name in gw.__all__:
        found = getattr(gw, name)
        if callable(found) and found not in RETURNED:
            yield f"gw.{name}", found


def algorithms() -> Iterator[tuple[str, Any]]:
    for kind in KINDS:
        for name in names(kind):
            yield f"{kind} {name}", load(kind, name)


@each("public", [at_the_root, algorithms])
def test_every_argument_is_explained(
    public: Callable[[], Iterator[tuple[str, Any]]],
) -> None:
    found = {name: unexplained(one) for name, one in public()}
    assert len(found) > 20
    assert {name: missing for name, missing in found.items() if missing} == {}


def test_no_argument_is_explained_that_there_is_not() -> None:
    found = {
        name: {*described(inspect.getdoc(one) or "", "Args")} - {*arguments(one)}
        for name, one in (*at_the_root(), *algorithms())
    }
    assert {name: extra for name, extra in found.items() if extra} == {}


def test_what_gradwire_alone_makes_lists_its_attributes() -> None:
    for one in RETURNED:
        listed = described(inspect.getdoc(one) or "", "Attributes")
        assert listed, one
        assert set(listed) <= {*vars(one), *one.__init__.__code__.co_names}, one
