"""The folder listing is the registry."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import gradwire as gw
from gradwire.contract import Compressor, Exchange
from gradwire.contract.collective import Collective
from gradwire.contract.registry import KINDS, examples, load, names
from gradwire.errors import InvalidSetting, UnknownName
from tests.runtime.ranks import run_alone

SOURCE = Path(gw.__file__).parent
BASES: dict[str, tuple[type, ...]] = {
    "compress": (Compressor, Exchange),
    "collective": (Collective,),
}
"""Registries of classes. Planners are functions: ``tests/laws/test_plans.py``."""


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_the_files_without_underscore(kind: str) -> None:
    folder = SOURCE.joinpath(*kind.split("."))
    files = {p.stem for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert set(names(kind)) == {f for f in files if not f.startswith("_")}
    assert list(names(kind)) == sorted(names(kind))


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k in BASES for n in names(k)])
def test_every_file_defines_its_name_and_examples(kind: str, name: str) -> None:
    found = load(kind, name)
    assert isinstance(found, type)
    assert issubclass(found, BASES[kind])
    assert found.__name__ == name
    assert found is getattr(getattr(gw, kind), name)
    own = [example for example in examples(kind) if type(example) is found]
    assert own, f"{kind}/{name}.py lists no EXAMPLES of its own"
    assert found() in own, "its defaults are not among its EXAMPLES"
    assert len(set(own)) == len(own)


@pytest.mark.parametrize("kind", KINDS)
def test_dir_lists_the_names(kind: str) -> None:
    assert dir(import_module(f"gradwire.{kind}")) == list(names(kind))


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("compress", "topkk", r"no compressor is called 'topkk'; there are: .*topk.*'topk'\?"),
        ("compress", "zzz", r"no compressor is called 'zzz'; there are: .*; choose one of these"),
        ("collective", "rings", r"no collective is called 'rings'; .*did you mean 'ring'\?"),
        ("compress", "_settle", "no compressor is called '_settle'"),
        ("compress", "../load", "no compressor is called"),
    ],
)
def test_unknown_names_are_told_the_known_ones(kind: str, given: str, message: str) -> None:
    with pytest.raises(UnknownName, match=message) as caught:
        load(kind, given)
    assert isinstance(caught.value, ValueError)


def test_attributes_that_no_file_bears() -> None:
    with pytest.raises(ValueError, match="did you mean 'onebit'"):
        gw.compress.onebits  # noqa: B018 - looking it up is the test
    assert not hasattr(gw.compress, "onebits")


def test_kinds_that_are_no_registry() -> None:
    with pytest.raises(InvalidSetting, match=r"one of compress, .*, planner, .*got 'kernels'"):
        names("kernels")


FIRST_IMPORTS = """
import sys

for first in (
    "import gradwire.compress.topk",
    "from gradwire.compress import topk",
    "from gradwire.compress.topk import topk",
    "import gradwire; gradwire.compress.topk",
):
    for name in [n for n in sys.modules if n.partition(".")[0] == "gradwire"]:
        del sys.modules[name]
    exec(first)
    import gradwire as gw

    assert isinstance(gw.compress.topk, type), first
"""


def test_the_class_is_bound_whichever_import_comes_first() -> None:
    """In a process of its own: here everything is imported already, and stays as it is."""
    run_alone(FIRST_IMPORTS)
