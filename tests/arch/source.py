"""The project's own source, read as text and syntax trees, for the tests beside this
file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "gradwire"
FURTHER = {
    "gradwire_lab": ROOT / "lab" / "src",
    "gradwire_bench": ROOT / "bench" / "src",
}
"""gradwire's further packages, and the folder that each lies in."""
BESIDE = (*FURTHER, "papers")
"""Packages beside the library; its rules hold for them too."""
FOLDERS = ("src", "lab", "bench", "papers")
"""The folders of the checkout that they lie in."""
TOGETHER = pytest.mark.xdist_group("source")
"""One worker runs all tests that read the source, so that it is parsed once."""


@cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a file's text: several tests ask for it."""
    return ast.parse(text)


@cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """All nodes of a file's tree, gathered once for all tests.

    Twice as fast as ``ast.walk``, without the marks of reading and writing, which are
    no code.
    """
    found: list[ast.AST] = [parsed(text)]
    for node in found:  # grows
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                found += [one for one in value if isinstance(one, ast.AST)]
            elif isinstance(value, ast.AST) and name != "ctx":
                found.append(value)
    return tuple(found)


@dataclass(frozen=True)
class Source:
    """A file: its dotted name, its path below gradwire or the checkout, and its
    tree.
    """

    name: str
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree, made when it is asked for: whoever collects tests needs
        none.
        """
        return parsed(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree, each before those below it."""
        return nodes_of(self.text)

    @cached_property
    def running(self) -> tuple[ast.AST, ...]:
        """All nodes but those below ``if TYPE_CHECKING``, which never run."""
        hidden = {
            id(below)
            for node in self.nodes
            if isinstance(node, ast.If)
            and ast.unparse(node.test).endswith("TYPE_CHECKING")
            for statement in node.body
            for below in ast.walk(statement)
        }
        return tuple(node for node in self.nodes if id(node) not in hidden)

    def __repr__(self) -> str:
        return self.path


def read(path: str, text: str) -> Source:
    """A source from its path, such as ``contract/spec.py`` or ``papers/store.py``."""
    parts = path.removesuffix(".py").split("/")
    if parts[-1] == "__init__":
        parts.pop()
    above = [] if parts[:1] and parts[0] in BESIDE else ["gradwire"]
    return Source(".".join([*above, *parts]), path, text)


@cache
def sources() -> tuple[Source, ...]:
    """Every Python file of gradwire, its further packages and the papers."""
    bases = {name: FURTHER.get(name, ROOT) for name in BESIDE}
    folders = (
        (PACKAGE, PACKAGE),
        *((base, base / name) for name, base in bases.items()),
    )
    return tuple(
        read(path.relative_to(base).as_posix(), path.read_text(encoding="utf-8"))
        for base, folder in folders
        for path in sorted(folder.rglob("*.py"))
    )


@cache
def module_names() -> frozenset[str]:
    """Dotted names of all modules and packages there are."""
    return frozenset(source.name for source in sources())


def origin(source: Source, node: ast.ImportFrom) -> str:
    """The dotted name of the module that ``from ... import`` names."""
    package = (
        source.name
        if source.path.endswith("__init__.py")
        else source.name.rpartition(".")[0]
    )
    if not node.level:
        return node.module or ""
    above = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def imports_of_names(source: Source) -> Iterator[tuple[str, str, str | None]]:
    """(module, name, the name given to it here or None) of every
    ``from module import name``.
    """
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield origin(source, node), alias.name, alias.asname


@cache
def imports(
    source: Source, known: frozenset[str] | None = None, *, for_types: bool = False
) -> tuple[tuple[int, str], ...]:
    """(line, dotted name) of everything a file imports, inside functions too.

    ``from package import name`` gives ``package.name`` where that is a module of ours.
    Imports below ``if TYPE_CHECKING`` count only with ``for_types``.
    """
    known = module_names() if known is None else known
    found = []
    for node in source.nodes if for_types else source.running:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = origin(source, node)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.append(
                    (node.lineno, full if full in known or base == "torch" else base)
                )
    return tuple(found)
