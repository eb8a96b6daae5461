"""Paths and names of modules that pages, docstrings and comments mention: each is
there.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache

import torch
import torch.distributed
import torch.optim
from torch import Tensor, nn

from gradwire.errors import NotInstalled
from tests.arch.source import (
    FOLDERS,
    FURTHER,
    PACKAGE,
    ROOT,
    TOGETHER,
    Source,
    nodes_of,
    sources,
)

pytestmark = TOGETHER

PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "docs/*.md")
"""CHANGELOG.md is none of them: it tells what was."""
WRITTEN = (*FOLDERS, "tests", "scripts", "examples")
PATH = re.compile(
    r"(?<![\w./<-])(?:[\w*<>-]+/)*[\w*<>-]+\.(?:pyi?|cpp|h|md|json|toml|compll)\b(?![\w/(])"
)
FOLDER = re.compile(r"(?<![\w./~<>$)-])(?:[a-z_]\w*/)+(?![\w./<(*-])")
DOTTED = re.compile(r"(?<![\w./-])gradwire(?:\.[A-Za-z_]\w*)+")
MEMBER = re.compile(r"`([a-z_]\w*)\.(?!py\b)([A-Za-z_]\w*)")
ANY_NAME = re.compile(r"<\w+>|NAME|\*")
"""A name that stands for any: ``compress/<name>.py``, ``tests/laws/broken*.py``."""

ELSEWHERE = {
    "own.py": "a reader's own file",
    "data.py": "a reader's own file",
    "FILE.py": "a reader's own file",
    "cluster.json": "a file that a command writes",
    "plan.json": "a file that a reader writes",
    "sparsity-<model>.json": "a file that a command writes",
    "decode.compll": "a reader's own program",
    "sockios.h": "of Linux",
    "<immintrin.h": "the compiler's",
    "sched.h": "of Linux",
    "if_tun.h": "of Linux",
    "virtio_net.h": "of Linux",
    "prctl.h": "of Linux",
    "script.py": "a reader's own file",
    "topics.py": "of Python",
    "step.__func__": "of a method that is patched",
    "gradwire.compressors": "a group of entry points",
    "gradwire.collectives": "a group of entry points",
    "gradwire.planners": "a group of entry points",
    "gradwire.commands": "a group of entry points",
    "store.wait": "of torch.distributed",
    "rate/": "a quotient",
    "k/": "a quotient",
}
"""The ends of paths, and names, that are none of this repository, and what they are."""


BARE = re.compile(r"(?<!`)(`{1,2})([A-Za-z_]\w*)\1(?!`)")
WORD = re.compile(r"[A-Za-z_]\w*")
FOREIGN = {
    "FindOptFusion": "an algorithm of Cupcake's paper",
    "Gauge": "of prometheus_client",
    "LightningCLI": "of Lightning",
    "Meter": "of OpenTelemetry",
    "save_state": "of Accelerate",
    "set_all_reduce_hook": "of torch's FSDPModule",
    "sockaddr_storage": "of Linux",
}
"""Names in docstrings that are none of this repository, and what they are."""


@cache
def here() -> frozenset[str]:
    """Every file and folder of the checkout; a folder ends in a slash."""
    tops = [ROOT / top for top in (*WRITTEN, "docs", ".ci")]
    files = [
        path
        for top in tops
        for path in top.rglob("*")
        if "__pycache__" not in path.parts
    ]
    files += [*ROOT.glob("*"), *tops]
    return frozenset(
        f"/{path.relative_to(ROOT).as_posix()}{'/' * path.is_dir()}" for path in files
    )


@cache
def endings() -> frozenset[str]:
    """Every end of every path of the checkout, from a folder on."""
    return frozenset(
        path[at + 1 :]
        for path in here()
        for at, letter in enumerate(path)
        if letter == "/"
    )


@cache
def is_there(path: str) -> bool:
    """Whether a path is the end of one of the checkout."""
    if ANY_NAME.search(path) is None:
        return path in endings()
    pattern = re.compile(f".*/{'[^/]*'.join(map(re.escape, ANY_NAME.split(path)))}")
    return any(pattern.fullmatch(one) for one in here())


def missing_paths(text: str) -> list[str]:
    """Files and folders that a text names and that are not there."""
    named = [match.group() for match in (*PATH.finditer(text), *FOLDER.finditer(text))]
    ours = [
        path
        for path in named
        if not any(f"/{path}".endswith(f"/{x}") for x in ELSEWHERE)
    ]
    return [path for path in ours if not is_there(path)]


def missing_names(text: str) -> list[str]:
    """Dotted names of gradwire that lead nowhere."""
    named = set(DOTTED.findall(text)) - {*ELSEWHERE}
    return [name for name in sorted(named) if not leads_somewhere(name)]


@cache
def code_of_modules() -> dict[str, str]:
    """All that is written in each file or folder of ``src`` and beside it, by its last
    name.
    """
    found: dict[str, str] = defaultdict(str)
    tops = (PACKAGE, *(base / name for name, base in FURTHER.items()), ROOT / "papers")
    for path in (path for top in tops for path in top.rglob("*.py")):
        text = f"{path.stem}\n{path.read_text(encoding='utf-8')}"
        found[path.stem] += text
        found[path.parent.name] += text
    return {name: text for name, text in found.items() if name != PACKAGE.name}


def missing_members(text: str) -> list[str]:
    """Names such as ``supersteps.Joint`` that the module does not have; a private one
    is ours.
    """
    return [
        f"{module}.{name}"
        for module, name in MEMBER.findall(text)
        if f"{module}.{name}" not in ELSEWHERE
        and (module in code_of_modules() or module.startswith("_"))
        and not re.search(rf"\b{name}\b", code_of_modules().get(module, ""))
    ]


def leads_somewhere(name: str) -> bool:
    """Whether a dotted name is a module, or what one defines."""
    module, found = name, []
    while True:
        try:
            value = importlib.import_module(module)
            break
        except NotInstalled:
            return True  # a file is there, whose package is not
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            found.insert(0, last)
    for attribute in found:
        if not hasattr(value, attribute):
            return False
        value = getattr(value, attribute)
    return True


def names_in(source: Source) -> Iterator[str]:
    """The names that a file defines or uses, and all words of its strings.

    Docstrings are left out, as one of them would prove what another says.
    """
    yield from WORD.findall(source.path.removesuffix(".py"))
    spoken = {id(node.value) for node in source.nodes if isinstance(node, ast.Expr)}
    for node in source.nodes:
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in spoken:
                yield from WORD.findall(node.value)
            continue
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield from value.split(".")


@cache
def known_names() -> frozenset[str]:
    """All names that a docstring may speak of without saying where they are from."""
    of_torch = (torch, Tensor, nn, nn.Module, torch.distributed, torch.optim)
    found = {name for source in sources() for name in names_in(source)}
    found.update(*map(dir, (builtins, *of_torch)))
    return frozenset(found)


def bare_names(source: Source) -> list[str]:
    """Names in back-ticks, without a dot or a bracket, in a file's docstrings."""
    return [
        match.group(2)
        for docstring in docstrings(source.nodes)
        for match in BARE.finditer(docstring)
    ]


def unknown_names(source: Source) -> list[str]:
    """Bare names in a file's docstrings that nothing has."""
    known = known_names() | FOREIGN.keys()
    return [name for name in bare_names(source) if name not in known]


COMMENTS = {".py": r"#.*", ".pyi": r"#.*", ".cpp": r"//.*", ".h": r"//.*"}


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The docstrings of a Python file, those of fields and constants too."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def reported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The strings of a Python file that name another: errors and notes for users."""
    for node in nodes:
        if isinstance(node, ast.Constant) and ".py" in str(node.value):
            yield str(node.value)


@cache
def texts() -> dict[str, str]:
    """The text of every page, and the docstrings and comments of every file of code, by
    file.
    """
    pages = [page for pattern in PAGES for page in ROOT.glob(pattern)]
    found = {
        page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8")
        for page in pages
    }
    for path in (path for top in WRITTEN for path in (ROOT / top).rglob("*")):
        if path.suffix in COMMENTS:
            code = path.read_text(encoding="utf-8")
            spoken = re.findall(COMMENTS[path.suffix], code)
            if path.suffix.startswith(".py"):
                nodes = nodes_of(code)
                is_test = ROOT / "tests" in path.parents
                spoken += [*docstrings(nodes), *(() if is_test else reported(nodes))]
            found[path.relative_to(ROOT).as_posix()] = "\n".join(spoken)
    return found


def test_paths_that_are_mentioned_are_there() -> None:
    assert [
        (file, path) for file, text in texts().items() for path in missing_paths(text)
    ] == []


def test_dotted_names_that_are_mentioned_lead_somewhere() -> None:
    assert [
        (file, name) for file, text in texts().items() for name in missing_names(text)
    ] == []


def test_members_of_modules_that_are_mentioned_are_there() -> None:
    found = [
        (file, name) for file, text in texts().items() for name in missing_members(text)
    ]
    assert found == []


def test_bare_names_in_docstrings_exist() -> None:
    found = [
        (source.path, name) for source in sources() for name in unknown_names(source)
    ]
    assert found == []


def test_what_lies_elsewhere_is_still_mentioned() -> None:
    every = "\n".join(texts().values())
    assert [path for path in ELSEWHERE if path not in every] == []
    mentioned = {name for source in sources() for name in bare_names(source)}
    assert FOREIGN.keys() <= mentioned
    assert not FOREIGN.keys() & known_names()
