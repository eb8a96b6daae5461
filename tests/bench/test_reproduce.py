"""`gradwire reproduce`: figures by name, files that are kept, JSON, and mistakes
answered.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from papers import names, page
from tests.cli.conftest import Ended
from tests.each import each

Run = Callable[..., Ended]


@pytest.mark.smoke
def test_a_figure_is_measured_once_and_written(gradwire: Run, tmp_path: Path) -> None:
    words = (
        "reproduce",
        "usbyte",
        "--quick",
        "--figure",
        "figure13",
        "--out",
        str(tmp_path),
    )
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


@each(
    "words, said",
    [
        ((), "called ''; there are: deft, hipress, ssfusion, usbyte, zen"),
        (
            ("usbite",),
            "called 'usbite'; there are: deft, hipress, ssfusion, usbyte, zen",
        ),
        (
            ("usbyte", "--figure", "figure81"),
            "there are: figure10, figure11, figure12, ",
        ),
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
    assert rows["figure 18"]["how"] == "simulated"
    assert rows["figure 17"]["how"] == "measured"
    assert "no meter of power" in rows["figure 17"]["why not"]
    assert rows["figure 19"]["reproduced as"] == "not reproduced"
    assert "an illustration" in rows["figure 19"]["why not"]
    one = json.loads(
        gradwire("reproduce", "zen", "--list", "--figure", "figure2b", "--json").out
    )
    assert [row["name"] for row in one["rows"]] == ["figure 2"]


def test_the_list_of_all_papers_has_a_command_or_a_reason_for_each(
    gradwire: Run,
) -> None:
    rows = json.loads(gradwire("reproduce", "--list", "--json").out)["rows"]
    found = {row["name"]: row for row in rows}
    assert len(found) == len(rows) == sum(len(page(name).contents) for name in names())
    assert found["zen, figure 2"]["command"] == (
        "gradwire reproduce zen --figure figure2a --figure figure2b"
    )
    lacking = [row for row in rows if row["command"] == "not reproduced"]
    assert lacking
    assert all(row["why not"] for row in lacking)
    assert found["zen, figure 15"]["how"] == "measured"
    assert found["hipress, table 3"]["how"] == "measured, simulated"
