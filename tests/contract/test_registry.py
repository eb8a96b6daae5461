"""The folder listing is the registry, and entry points of other packages add to it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import gradwire as gw
import gradwire_lab
from gradwire import _OF_LAB
from gradwire.contract import Compressor, Exchange, registry
from gradwire.contract.collective import Collective
from gradwire.contract.registry import (
    COMMANDS,
    EXTENSIONS,
    KINDS,
    SHARED,
    examples,
    extension,
    further_names,
    homes,
    load,
    names,
)
from gradwire.errors import InvalidSetting, NotInstalled, UnknownName
from scripts.make_further import declared
from tests.each import each
from tests.runtime.ranks import run_alone

SOURCE, LAB = Path(gw.__file__).parent, Path(gradwire_lab.__file__).parent
BASES: dict[str, tuple[type, ...]] = {
    "compress": (Compressor, Exchange),
    "collective": (Collective,),
}
"""Registries of classes. Planners are functions: ``tests/laws/test_plans.py``."""


@each("kind", KINDS)
def test_names_are_the_files_without_underscore(kind: str) -> None:
    folders = [SOURCE.joinpath(*KINDS[kind].folder.split(".")[1:])]
    if KINDS[kind].group in further_names():
        folders.append(LAB / folders[0].name)
    paths = (path for folder in folders for path in folder.iterdir())
    files = {p.stem for p in paths if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert set(names(kind)) == {f for f in files - SHARED if not f.startswith("_")}
    assert list(names(kind)) == sorted(names(kind))


@each("kind, name", [(k, n) for k in BASES for n in names(k)])
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


@each("kind", KINDS)
def test_dir_lists_the_names(kind: str) -> None:
    assert dir(import_module(KINDS[kind].folder)) == list(names(kind))


@each(
    "kind, given, message",
    [
        (
            "compress",
            "topkk",
            r"no compressor is called 'topkk'; there are: .*topk.*'topk'\?",
        ),
        (
            "compress",
            "zzz",
            r"no compressor is called 'zzz'; there are: .*; choose one of these",
        ),
        (
            "collective",
            "rings",
            r"no collective is called 'rings'; .*did you mean 'ring'\?",
        ),
        ("compress", "_settle", "no compressor is called '_settle'"),
        ("compress", "../load", "no compressor is called"),
    ],
)
def test_unknown_names_are_told_the_known_ones(
    kind: str, given: str, message: str
) -> None:
    with pytest.raises(UnknownName, match=message) as caught:
        load(kind, given)
    assert isinstance(caught.value, ValueError)


def test_an_attribute_that_no_file_bears_suggests_a_near_one() -> None:
    with pytest.raises(ValueError, match="did you mean 'onebit'"):
        gw.compress.onebits  # noqa: B018 - looking it up is the test
    assert not hasattr(gw.compress, "onebits")


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
    """In a process of its own: here everything is imported already, and stays as it
    is.
    """
    run_alone(FIRST_IMPORTS)


# ---- other packages ------------------------------------------------------------------


def test_names_of_further_packages_are_known_where_these_are_not_installed() -> None:
    """The file has what the packages declare: ``python -m scripts.make_further``."""
    assert further_names() == declared()
    groups = {kind.group for kind in (*KINDS.values(), COMMANDS)}
    assert groups - {""} | {EXTENSIONS} == set(further_names())
    for name in further_names()[EXTENSIONS]:
        assert extension(name, "this") is not None


def test_no_name_of_a_further_package_is_written_by_hand() -> None:
    """Else a table in the library and the packages could come apart."""
    text = Path(registry.__file__).read_text(encoding="utf-8")
    for declared_names in further_names().values():
        for name in declared_names:
            assert f'"{name}"' not in text
    assert "gradwire-lab" not in text


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """Entry points in place of the real ones: none at first."""
    points: list[EntryPoint] = []

    def chosen(*, group: str, name: str | None = None) -> list[EntryPoint]:
        return [p for p in points if p.group == group and name in (None, p.name)]

    homes.cache_clear()
    monkeypatch.setattr(registry, "entry_points", chosen)
    yield points
    homes.cache_clear()


@pytest.mark.usefixtures("installed")
@each(
    "kind, name",
    [("compress", "sidco"), ("collective", "sparcml"), ("planner", "espresso")],
)
def test_an_algorithm_that_is_not_installed_is_refused_with_its_package(
    kind: str, name: str
) -> None:
    with pytest.raises(
        NotInstalled,
        match=rf"'{name}' needs gradwire-lab, .*pip install \./lab \(in a checkout",
    ):
        load(kind, name)


@pytest.mark.usefixtures("installed")
def test_a_function_that_is_not_installed_is_named_with_what_installs_it() -> None:
    with pytest.raises(
        NotInstalled, match=r"gw\.adapt needs .*: pip install \./lab \(in a"
    ):
        gw.adapt  # noqa: B018
    for name, package in further_names()[EXTENSIONS].items():
        with pytest.raises(NotInstalled, match=f"this one needs {package}, .*/lab"):
            extension(name, "this one")
    for name in _OF_LAB:
        with pytest.raises(NotInstalled, match=rf"^gw\.{name} needs gradwire-lab"):
            getattr(gw, name)


def test_an_object_and_a_package_add_algorithms(installed: list[EntryPoint]) -> None:
    group = "gradwire.compressors"
    installed.append(EntryPoint("mine", "gradwire.compress.topk:topk", group))
    installed.append(EntryPoint("any", "gradwire_lab.compress", group))
    assert load("compress", "mine") is gw.compress.topk
    assert load("compress", "sidco").__name__ == "sidco"
    assert {"mine", "sidco", "topk"} <= set(names("compress"))


def test_two_packages_with_one_name_are_refused(installed: list[EntryPoint]) -> None:
    installed.append(
        EntryPoint("topk", "own_package.other:thing", "gradwire.compressors")
    )
    with pytest.raises(
        InvalidSetting, match=r"'topk' is defined by two .*, gradwire and own_pack"
    ):
        load("compress", "topk")
    assert load("compress", "onebit") is gw.compress.onebit


def test_an_entry_point_of_nothing_is_named_and_left_out(
    installed: list[EntryPoint], caplog: pytest.LogCaptureFixture
) -> None:
    installed.append(
        EntryPoint("bad", "gradwire.contract.registry", "gradwire.planners")
    )
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert "mgwfbp" in names("planner")
    assert "registry is not a package" in caplog.text
