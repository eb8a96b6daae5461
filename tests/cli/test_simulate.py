"""`gradwire simulate`: rows by planner, a picture, Chrome traces, and mistakes answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire.cli.simulate import app
from gradwire.errors import InvalidSetting
from gradwire.load import names

RUN = CliRunner()


def rows(*words: str) -> list[dict[str, float]]:
    done = RUN.invoke(app, [*words, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: list[dict[str, float]] = json.loads(done.output)["rows"]
    return found


def test_a_row_for_each_planner_and_none_below_its_computation() -> None:
    found = rows("--model", "vgg16")
    assert [row["name"] for row in found] == list(names("planner"))
    for row in found:
        assert row["simulated_s"] >= row["compute_s"] > 0
    by_name = {row["name"]: row for row in found}
    assert by_name["usbyte"]["simulated_s"] < by_name["wfbp"]["simulated_s"]
    assert by_name["wfbp"]["speedup_vs_wfbp"] == 1.0


def test_one_rank_sends_nothing() -> None:
    for row in rows("--model", "vgg16", "--ranks", "1"):
        assert row["simulated_s"] == pytest.approx(row["compute_s"])


def test_pictures_and_traces_are_written(tmp_path: Path) -> None:
    picture, traces = tmp_path / "steps.png", tmp_path / "traces"
    more = ("--picture", str(picture), "--traces", str(traces))
    rows("--model", "vgg16", "--planner", "usbyte", *more)
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads((traces / "usbyte.trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "vgg61"), "vgg16"),
        (("--model", "vgg16", "--planner", "usbite"), "usbyte"),
        (("--model", "vgg16", "--rate", "fast"), "500mbit"),
    ],
)
def test_mistakes_are_answered(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        RUN.invoke(app, list(words), catch_exceptions=False)
