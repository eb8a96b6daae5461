"""One name, one idea: what may be defined twice in ``src``."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tests.arch.source import BESIDE, TOGETHER, Source, imports_of_names, sources

pytestmark = TOGETHER

TWICE: dict[str, str] = {}
"""Nouns that two files may define, and why."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def library() -> tuple[Source, ...]:
    return tuple(
        source for source in sources() if source.name.split(".")[0] not in BESIDE
    )


def defined(source: Source) -> Iterator[str]:
    """Public classes, functions and type aliases of a file."""
    for node in source.tree.body:
        if isinstance(node, (*Function.__args__, ast.ClassDef)):
            name = node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id if is_noun(node.targets[0].id) else "_"
        else:
            continue
        if not name.startswith("_"):
            yield name


def is_noun(name: str) -> bool:
    """Whether a name is written as those of classes and type aliases are:
    ``PlannedMessage``.
    """
    return re.fullmatch(r"(?:[A-Z][a-z0-9]*)+", name) is not None and not name.isupper()


def doubled_nouns(files: Iterable[Source]) -> dict[str, list[str]]:
    """The files of each noun that more than one of them defines."""
    homes: dict[str, list[str]] = defaultdict(list)
    for source in files:
        for name in set(filter(is_noun, defined(source))):
            homes[name].append(source.path)
    return {name: paths for name, paths in homes.items() if len(paths) > 1}


def ambiguous_functions(files: Iterable[Source]) -> dict[str, list[str]]:
    """The modules of each function that several of them define and are asked for by its
    bare name.

    ``bars.draw`` says which ``draw`` it is, and so does
    ``from .layers import profile as profile_model``. A bare name that comes from one
    module only needs nothing more.
    """
    files = tuple(files)
    homes = {
        (source.name, name)
        for source in files
        for name in defined(source)
        if not is_noun(name)
    }
    asked: dict[str, set[str]] = defaultdict(set)
    for source in files:
        for module, name, alias in imports_of_names(source):
            if alias is None and (module, name) in homes:
                asked[name].add(module)
    return {
        name: sorted(modules) for name, modules in asked.items() if len(modules) > 1
    }


def test_a_noun_has_one_home() -> None:
    assert set(doubled_nouns(library())) == set(TWICE)


def test_a_function_that_is_asked_for_by_its_bare_name_has_one_home() -> None:
    assert ambiguous_functions(library()) == {}
