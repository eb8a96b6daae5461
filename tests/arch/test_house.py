"""Names and docstrings of files, and what a wheel of the library holds."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from torch import nn

import gradwire
from tests.arch.source import FOLDERS, PACKAGE, ROOT, TOGETHER, Source, sources
from tests.each import each

pytestmark = TOGETHER

LOOSE = {"__init__.py", "errors.py", "version.py"}
MAX_FOLDERS = 12
MAX_DEPTH = 4
FROM_ANYWHERE = re.compile(r"sys\.executable,\s*[\"']-[mc]")
DANGLING = re.compile(r"\s*(Of|Those|As|With|What|Which)\b")
VAGUE = re.compile(r"util|common|helper|manager|misc", re.I)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _public(body: list[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
    for node in body:
        if isinstance(
            node, (*Function.__args__, ast.ClassDef)
        ) and not node.name.startswith("_"):
            yield node


def undocumented(source: Source) -> list[str]:
    """The module, public classes and public functions without a docstring.

    Methods are free: what ``encode`` or ``run`` means stands once, in the contract they
    fulfil. So are the names in files that start with an underscore, which are not
    public.
    """
    missing = [] if ast.get_docstring(source.tree) else [f"{source.path}: the module"]
    if source.path.rpartition("/")[2].startswith("_"):
        return missing
    return missing + [
        f"{source.path}:{node.lineno} {node.name}"
        for node in _public(source.tree.body)
        if not ast.get_docstring(node)
    ]


def dangling(source: Source) -> list[str]:
    """Docstrings, those of fields and constants too, that only the line above would
    explain.
    """
    return [
        f"{source.path}:{node.lineno} {node.value.value.strip().splitlines()[0]}"
        for node in source.nodes
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and DANGLING.match(node.value.value)
    ]


def _own_private(source: Source) -> set[str]:
    """Names with an underscore that the classes of a file give to their instances."""
    found = set()
    for node in source.nodes:
        if isinstance(node, Function):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return {
        name for name in found if name.startswith("_") and not name.startswith("__")
    }


def reaches_inside(files: Iterable[Source]) -> list[str]:
    """Uses of an underscored attribute of a class that stands in another file."""
    own = {source.path: _own_private(source) for source in files}
    known = set().union(*own.values()) - set(dir(nn.Module()))
    return [
        f"{source.path}:{node.lineno} {ast.unparse(node)}"
        for source in files
        for node in source.nodes
        if isinstance(node, ast.Attribute)
        and node.attr in known - own[source.path]
        and ast.unparse(node.value) not in ("self", "cls", "super()")
    ]


def test_nobody_reaches_inside_of_another() -> None:
    assert reaches_inside(sources()) == []


def test_all_that_is_public_is_documented() -> None:
    assert [name for source in sources() for name in undocumented(source)] == []


def test_docstrings_begin_with_their_subject() -> None:
    assert [opening for source in sources() for opening in dangling(source)] == []


@each("folder", [*FOLDERS, "tests", "examples", "scripts"])
def test_no_file_has_a_vague_name(folder: str) -> None:
    paths = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py")]
    assert [str(path) for path in paths if VAGUE.search(path.stem)] == []


def test_the_library_has_few_rooms_and_no_loose_files() -> None:
    files = [p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py")]
    assert {p.name for p in files if len(p.parts) == 1} == LOOSE
    assert len({p.parts[0] for p in files if len(p.parts) > 1}) <= MAX_FOLDERS
    assert [str(p) for p in files if len(p.parts) > MAX_DEPTH] == []


def test_tests_have_a_folder_for_each_folder_of_the_library() -> None:
    def rooms(folder: Path) -> set[str]:
        return {path.parent.name for path in folder.glob("*/*.py")}

    assert rooms(ROOT / "tests") >= rooms(PACKAGE)
    assert rooms(ROOT / "tests" / "runtime") == rooms(PACKAGE / "runtime")


def test_a_wheel_holds_the_library_alone_and_an_sdist_all() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    targets = tool["hatch"]["build"]["targets"]
    # adds kernels, in a wheel of a platform
    hook = {"custom": {"path": "scripts/hatch_build.py"}}
    assert targets["wheel"] == {"packages": ["src/gradwire"], "hooks": hook}
    assert {*FOLDERS, "tests"} <= set(targets["sdist"]["include"])
    checked = {file.split("/")[0] for file in tool["mypy"]["files"]}
    assert checked == {*FOLDERS, "tests", "scripts"}


def test_the_root_only_looks_names_up() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    defined = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (*Function.__args__, ast.ClassDef))
    ]
    assert defined == ["__getattr__"]


def test_nothing_is_left_for_later() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    assert [source.path for source in sources() if marks.search(source.text)] == []


def test_the_package_is_typed_and_has_one_version() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert gradwire.__version__ == metadata.version("gradwire")
    assert f"## {gradwire.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_children_import_nothing_of_the_folder_that_they_are_started_in() -> None:
    """Python looks there first for the modules of ``-m``, and a training's folder may
    have any.
    """
    assert [
        source.path for source in sources() if FROM_ANYWHERE.search(source.text)
    ] == []
