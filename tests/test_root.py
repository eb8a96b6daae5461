"""``import gradwire as gw``: names and modules are there whatever was imported
before.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire as gw
from tests.each import each
from tests.runtime.ranks import run_alone

SOURCE = Path(gw.__file__).parent
STUB = SOURCE / "__init__.pyi"
MODULES = {p.stem for p in SOURCE.glob("*.py")} | {
    p.parent.name for p in SOURCE.glob("*/*.py")
}


def stub_names() -> list[str]:
    """What type checkers are told."""
    names = []
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            names += [alias.asname or "" for alias in node.names]
        elif isinstance(node, ast.FunctionDef):
            names.append(node.name)
    return names


def test_type_checkers_see_the_names_there_are() -> None:
    assert sorted(stub_names()) == sorted(gw.__all__)
    assert len(set(gw.__all__)) == len(gw.__all__)


def test_type_checkers_need_no_further_package() -> None:
    """A stub that imported the lab would be an error where it is not installed."""
    statements = STUB.read_text(encoding="utf-8").splitlines()
    imports = [line for line in statements if line.startswith(("from", "import"))]
    assert [line for line in imports if "gradwire_" in line] == []


def test_the_stub_of_a_function_of_the_lab_has_its_result() -> None:
    nodes = ast.parse(STUB.read_text(encoding="utf-8")).body
    stubs = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    assert set(stubs) == set(gw._OF_LAB)
    for name, stub in stubs.items():
        assert stub.returns is not None
        returned = getattr(gw, name).__annotations__["return"]
        assert ast.unparse(stub.returns) == getattr(returned, "__name__", returned)


@each("name", gw.__all__)
def test_every_name_is_found_and_is_its_own(name: str) -> None:
    found = getattr(gw, name)
    assert getattr(gw, name) is found
    if isinstance(found, type) or callable(found):
        assert found.__name__ == name
        assert found.__module__.startswith(("gradwire.", "gradwire_lab."))


def test_no_name_is_also_a_module() -> None:
    """Importing such a module would put it in the name's place."""
    packages = {
        "catalogue",
        "collective",
        "compress",
        "errors",
        "fsdp",
        "pilot",
        "planner",
        "recipes",
    }
    assert (set(gw.__all__) - packages) & MODULES == set()


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(
        AttributeError, match=r"'atach'; there are: .*did you mean 'attach'"
    ):
        gw.atach  # noqa: B018 - looking it up is the test
    assert not hasattr(gw, "errors.InvalidSetting")


IMPORT_ORDERS = """
import sys

for first in (
    "import gradwire",
    "import gradwire.contract.registry, gradwire.exchange.by_name, gradwire.errors",
    "from gradwire import contract, exchange",
    "import gradwire; gradwire.pair",
    "from gradwire.runtime.attach import attach",
):
    for name in [n for n in sys.modules if n.partition(".")[0] == "gradwire"]:
        del sys.modules[name]
    exec(first)
    import gradwire as gw

    modules = (gw.errors, gw.exchange, gw.contract, gw.planning, gw.runtime)
    assert {type(m).__name__ for m in modules} == {"module"}, first
    assert [m.__name__ for m in modules] == [
        "gradwire.errors",
        "gradwire.exchange",
        "gradwire.contract",
        "gradwire.planning",
        "gradwire.runtime",
    ], first
    assert gw.InvalidSetting is gw.errors.InvalidSetting, first
    assert gw.attach.__name__ == "attach", first
"""


def test_modules_are_the_same_whatever_was_imported_before() -> None:
    """In a process of its own: here everything is imported already, and stays as it
    is.
    """
    run_alone(IMPORT_ORDERS)


def test_the_root_alone_does_not_import_torch() -> None:
    code = (
        "import sys, gradwire; gradwire.errors.InvalidSetting; assert 'torch' not "
        "in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
