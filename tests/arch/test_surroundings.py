"""What files take from the machine: text in an encoding that is named, optional
packages late.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator

from tests.arch.source import FOLDERS, ROOT, TOGETHER, Source, imports, parsed, sources
from tests.each import each

pytestmark = TOGETHER

EVERY = (*FOLDERS, "scripts", "examples")
NEED_ONE = re.compile(
    r"gpu/device\.py$|/(permutation|runs|hashing)_device\.py$|^integrations/"
)
"""Files that are imported only where a package is: in triton's language, or for a
framework.
"""
UNPICKLES = re.compile(
    r"c?pickle|marshal|dill|shelve|cloudpickle|(?!py_)\w+_object(_list)?"
)
"""Modules that load pickles, and the calls of torch.distributed by which ranks send
them.
"""


def optional_packages() -> frozenset[str]:
    """What the extras for users install; each is imported under the name it is
    installed by.
    """
    projects = (ROOT / folder / "pyproject.toml" for folder in ("", "lab"))
    texts = (path.read_text(encoding="utf-8") for path in projects)
    return frozenset(
        re.split(r"[^\w-]", requirement, maxsplit=1)[0]
        for text in texts
        for extra, requirements in tomllib.loads(text)["project"][
            "optional-dependencies"
        ].items()
        if extra not in ("dev", "docs")
        for requirement in requirements
    )


def _opens_text(call: ast.Call) -> bool:
    """Whether it is an ``open`` whose mode is written down, or left out, and is one of
    text.
    """
    modes = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
    written = [one.value for one in modes if isinstance(one, ast.Constant)]
    mode = next(
        (one for one in written if isinstance(one, str) and len(one) <= 3), None
    )
    if isinstance(call.func, ast.Name) and call.func.id == "open":
        return "b" not in (mode or "r")
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr == "open"
    return is_method and "b" not in (mode or ("r" if not call.args else "b"))


def unnamed_encodings(tree: ast.AST) -> Iterator[int]:
    """Lines that read or write text in whatever encoding the locale has."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        named = any(word.arg == "encoding" for word in call.keywords)
        attribute = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if not named and (
            attribute in ("read_text", "write_text") or _opens_text(call)
        ):
            yield call.lineno


def early_imports(source: Source, optional: frozenset[str]) -> list[str]:
    """Imports of optional packages that happen as soon as the file is imported."""
    inside = {
        node.lineno
        for function in source.running
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    return [
        f"{source.path}:{line} imports {name}"
        for line, name in imports(source)
        if name.split(".")[0] in optional and line not in inside
    ]


@each("folder", EVERY)
def test_text_is_read_and_written_in_a_named_encoding(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in unnamed_encodings(parsed(path.read_text(encoding="utf-8")))
    ]
    assert found == []


def unpickling(source: Source) -> list[str]:
    """Imports and calls that would run whatever a pickle from elsewhere names."""
    found = []
    for node in source.nodes:
        match node:
            case ast.Import(names) | ast.ImportFrom(None, names):
                named = {name.name.partition(".")[0] for name in names}
            case ast.ImportFrom(module, names):
                named = {module, *(name.name for name in names)}
            case ast.Attribute(_, name):
                named = {name}
            case ast.Call(func, _, keywords) if ast.unparse(func) == "torch.load":
                safe = any(
                    word.arg == "weights_only" and ast.unparse(word.value) == "True"
                    for word in keywords
                )
                named = set() if safe else {"pickle"}
            case _:
                continue
        if any(UNPICKLES.fullmatch(str(name)) for name in named):
            found.append(f"{source.path}:{node.lineno} {ast.unparse(node)}")
    return found


def test_no_pickle_of_a_peer_or_a_file_is_run() -> None:
    assert [one for source in sources() for one in unpickling(source)] == []


def test_gradwire_is_imported_without_its_optional_packages() -> None:
    optional = optional_packages()
    frameworks = {"accelerate", "lightning", "transformers"}
    assert optional == {"matplotlib", "jinja2", "optuna", "lark", "triton", *frameworks}
    for source in sources():
        if not NEED_ONE.search(source.path):
            assert early_imports(source, optional) == []


def test_nothing_that_is_shipped_imports_what_tests_are_written_with() -> None:
    """The laws are shipped too: who has no pytest or hypothesis holds algorithms to
    them.
    """
    found = [
        f"{source.path}:{line} imports {name}"
        for source in sources()
        for line, name in imports(source)
        if name.split(".")[0] in ("pytest", "_pytest", "hypothesis", "tests")
    ]
    assert found == []
