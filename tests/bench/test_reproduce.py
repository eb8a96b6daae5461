"""`gradwire reproduce`: figures by name, files that are kept, JSON, and mistakes answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.errors import InvalidSetting
from gradwire_bench.cli import _checkout
from tests.cli.conftest import Ended

Run = Callable[..., Ended]


def test_a_figure_is_measured_once_and_written(gradwire: Run, tmp_path: Path) -> None:
    words = ("reproduce", "usbyte", "--quick", "--figure", "figure13", "--out", str(tmp_path))
    first, second = gradwire(*words), gradwire(*words)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "a stated throughput model of a V100" in first.out
    assert "(measured before)" not in first.out
    assert "(measured before)" in second.out
    assert (tmp_path / "usbyte" / "figure13.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "usbyte" / "figure13.md").read_text()
    assert "| section 6.3, figure 13 |" in table
    fresh = gradwire(*words, "--fresh")
    assert "(measured before)" not in fresh.out


def test_json_holds_assumptions_rows_and_claims(gradwire: Run, tmp_path: Path) -> None:
    words = ("--quick", "--figure", "figure13", "--out", str(tmp_path), "--json")
    ended = gradwire("reproduce", "usbyte", *words)
    assert ended.code == 0, ended.err
    printed = json.loads(ended.out)
    keys = {"command", "version", "machine", "paper", "assumptions", "figures", "reproduction"}
    assert keys <= set(printed)
    assert printed["command"] == "reproduce usbyte"
    assert len(printed["assumptions"]) >= 5
    figure = printed["figures"]["figure13"]
    assert {row["model"] for row in figure["rows"]} == {"resnet50", "vgg16"}
    assert all(row["num_faster"] == 0 for row in figure["rows"])
    claim = figure["claims"][0]
    assert set(claim) == {"says", "place", "ours", "agrees", "why"}
    stored = json.loads((tmp_path / "usbyte.json").read_text())
    assert stored["figures"]["figure13"]["rows"] == figure["rows"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("usbite",), "called 'usbite'; there are: deft, hipress, ssfusion, usbyte, zen"),
        (("usbyte", "--figure", "figure81"), "there are: figure10, figure11, figure13, "),
    ],
)
def test_mistakes_are_answered(
    gradwire: Run, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    ended = gradwire("reproduce", *words, "--out", str(tmp_path))
    assert ended.code == 2
    assert said in ended.err
    assert ended.out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_list_says_what_is_reproduced_and_why_not(gradwire: Run) -> None:
    ended = gradwire("reproduce", "usbyte", "--list", "--json")
    assert ended.code == 0, ended.err
    printed = json.loads(ended.out)
    assert printed["command"] == "reproduce usbyte --list"
    rows = {row["name"]: row for row in printed["rows"]}
    assert rows["figure 18"]["reproduced as"] == "figure18"
    assert rows["figure 17"]["reproduced as"] == "not reproduced"
    assert "no meter of power" in rows["figure 17"]["why not"]
    assert "not reproduced" in gradwire("reproduce", "usbyte", "--list").out
    one = json.loads(gradwire("reproduce", "zen", "--list", "--figure", "figure2b", "--json").out)
    assert [row["name"] for row in one["rows"]] == ["figure 2"]


def test_a_wheel_says_where_the_papers_are(
    gradwire: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages" / "gradwire"
    monkeypatch.setattr(_checkout, "PACKAGE", site)
    ended = gradwire("reproduce", "usbyte", "--list")
    assert ended.code == 2
    assert f"papers/ is part of gradwire's source repository and not of {site.parent}" in ended.err
    assert "pip install --editable" in ended.err


def test_another_package_beside_an_installed_one_is_not_the_papers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "__init__.py").touch()
    monkeypatch.setattr(_checkout, "PACKAGE", tmp_path / "lib" / "gradwire")
    with pytest.raises(InvalidSetting, match="source repository"):
        _checkout.beside_src("papers", "command")
