"""`gradwire simulate`: rows by planner, a picture, Chrome traces, and mistakes
answered.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from gradwire.contract.registry import names
from gradwire.errors import InvalidSetting
from gradwire_bench.cli.simulate import app
from tests.each import each

RUN = CliRunner()


def rows(*words: str) -> list[dict[str, Any]]:
    done = RUN.invoke(app, [*words, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.output)["rows"]
    return found


@pytest.mark.smoke
def test_a_row_for_each_planner_and_none_below_its_computation() -> None:
    found = rows("--model", "vgg16")
    assert [row["name"] for row in found] == [
        name for name in names("planner") if name != "secopa"
    ]
    for row in found:
        assert row["simulated_s"] >= row["compute_s"] > 0
    by_name = {row["name"]: row for row in found}
    assert by_name["usbyte"]["simulated_s"] < by_name["wfbp"]["simulated_s"]
    assert by_name["wfbp"]["speedup_vs_wfbp"] == 1.0


def test_sweeps_have_a_row_for_every_model_size_rate_and_planner() -> None:
    sweep = (
        "--model",
        "vgg16",
        "--model",
        "lstm",
        "--ranks",
        "4,8",
        "--rate",
        "1gbit,10gbit",
    )
    found = rows(*sweep, "--planner", "wfbp", "--planner", "ddp")
    keys = [
        (r["model"], r["num_ranks"], r["rate_bytes_per_s"], r["name"]) for r in found
    ]
    assert len(set(keys)) == len(keys) == 2 * 2 * 2 * 2
    for row in found:
        assert row["speedup_vs_one_rank"] == pytest.approx(
            row["num_ranks"] * row["compute_s"] / row["simulated_s"]
        )
        assert 0 < row["speedup_vs_one_rank"] <= row["num_ranks"]
    alone = rows(
        "--model", "vgg16", "--ranks", "8", "--rate", "1gbit", "--planner", "wfbp"
    )[0]
    same = next(
        r
        for r, key in zip(found, keys, strict=True)
        if key == ("vgg16", 8, 1.25e8, "wfbp")
    )
    assert {**same, "speedup_vs_wfbp": 1.0} == alone


@each(
    "words, said",
    [
        (("--model", "vgg16", "--ranks", "0"), "write --ranks 8,16,32"),
        (
            ("--model", "lstm", "--ranks", "2,4", "--picture", "x.png"),
            "write --curves for several",
        ),
        (("--model", "lstm", "--curves", "x.png"), "write --ranks 8,16,32"),
        (("--model", "vgg16", "--planner", "usbite"), "usbyte"),
    ],
)
def test_mistakes_are_answered(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        RUN.invoke(app, list(words), catch_exceptions=False)
