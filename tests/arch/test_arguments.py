"""Docstrings name every argument: of the names at the root and of all algorithms."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, EnumMeta
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
ENTRY = re.compile(r"^ {4}(\w+): (\S.*\n(?: {5,}.*\n|\n)*)", re.M)


def described(documented: Any, section: str) -> dict[str, str]:
    """The names that a section of a docstring explains, and its words on each."""
    docstring = inspect.getdoc(documented) or ""
    for title, body in SECTION.findall(f"{docstring}\n"):
        if title == section:
            return dict(ENTRY.findall(body))
    return {}


def arguments(documented: Any) -> list[str]:
    """The arguments of a function or class that a caller may pass by name."""
    various = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    try:
        found = inspect.signature(documented).parameters.values()
    except ValueError:  # an exception without an __init__ of its own
        return []
    return [
        one.name for one in found if one.kind not in various and one.name not in WRITTEN
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
    explained = {name for one in (documented, home) for name in described(one, section)}
    return [name for name in wanted if name not in explained]


def without_default(documented: Any) -> list[str]:
    """The arguments with a default that the docstring does not state."""
    explained = described(documented, "Args")
    return [
        name
        for name, words in explained.items()
        if inspect.signature(documented).parameters[name].default is not Parameter.empty
        and "default" not in words.lower()
    ]


def at_the_root() -> Iterator[tuple[str, Any]]:
    for name in gw.__all__:
        found = getattr(gw, name)
        if callable(found) and found not in RETURNED:
            yield f"gw.{name}", found


def in_modules() -> Iterator[tuple[str, Any]]:
    """Functions that users call by a module at the root."""
    yield "gw.fsdp.reduce_scatter", gw.fsdp.reduce_scatter
    for module in (gw.catalogue, gw.recipes):
        for name, found in vars(module).items():
            is_own = getattr(found, "__module__", "") == module.__name__
            if inspect.isfunction(found) and is_own and not name.startswith("_"):
                yield f"{module.__name__}.{name}", found


def algorithms() -> Iterator[tuple[str, Any]]:
    for kind in KINDS:
        for name in names(kind):
            yield f"{kind} {name}", load(kind, name)


@each("public", [at_the_root, in_modules, algorithms])
def test_every_argument_is_explained(
    public: Callable[[], Iterator[tuple[str, Any]]],
) -> None:
    found = {name: unexplained(one) for name, one in public()}
    assert found
    assert {name: missing for name, missing in found.items() if missing} == {}


def test_no_argument_is_explained_that_there_is_not() -> None:
    found = {
        name: {*described(one, "Args")} - {*arguments(one)}
        for name, one in (*at_the_root(), *algorithms())
    }
    assert {name: extra for name, extra in found.items() if extra} == {}


def test_what_gradwire_alone_makes_lists_its_attributes() -> None:
    for one in RETURNED:
        listed = described(one, "Attributes")
        assert listed, one
        assert set(listed) <= {*vars(one), *one.__init__.__code__.co_names}, one


@each("public", [at_the_root, in_modules, algorithms])
def test_every_default_is_stated(
    public: Callable[[], Iterator[tuple[str, Any]]],
) -> None:
    found = {name: without_default(one) for name, one in public()}
    assert found
    assert {name: missing for name, missing in found.items() if missing} == {}


def unnamed(first: int, second: int = 2) -> None:
    """Adds numbers.

    Args:
        first: A number.
            second: Is no entry of its own.
    """


def named(first: int, second: int = 2, *rest: int, **settings: int) -> None:
    """Adds numbers.

    Args:
        first: A number.
        second: Another number; default 2.

    Raises:
        InvalidSetting: A number is below 0.
    """


@dataclass(frozen=True, kw_only=True)
class Base:
    """Keeps a share.

    Args:
        density: The share, in (0, 1]; default 0.01.
    """

    density: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    """Keeps a share, drawn at random."""

    seed: int = 0


class Failed(Exception):
    """A rank failed.

    Args:
        ranks: The failed ranks.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)


class Lost(Failed):
    """A rank failed for good."""


class Bare(Enum):
    """Kinds of content."""

    DENSE = 1


class Full(Enum):
    """Kinds of content.

    Attributes:
        DENSE: One value for each element.
    """

    DENSE = 1


@each(
    "specimen, wanted",
    [
        (unnamed, ["second"]),
        (named, []),
        (Base, []),
        (Derived, ["seed", "density"]),
        (Failed, []),
        (Lost, []),
        (Bare, ["DENSE"]),
        (Full, []),
    ],
)
def test_the_rule_finds_what_is_unexplained(specimen: Any, wanted: list[str]) -> None:
    assert {*unexplained(specimen)} == {*wanted}


def test_the_rule_finds_a_default_that_is_not_stated() -> None:
    def silent(first: int, second: int = 2) -> None:
        """Adds numbers.

        Args:
            first: A number.
            second: Another number.
        """

    assert without_default(silent) == ["second"]
    assert without_default(named) == []
