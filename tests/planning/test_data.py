"""Plans as files: exact round trip, and errors that name the entry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradwire.errors import InvalidSetting
from gradwire.planning.data.plan import Chunk, ExchangeSetting, Plan, PlannedMessage
from tests.each import each

PLAN = Plan(
    planner="by hand",
    model="m",
    settings={"bytes": 1, "share": 0.1, "fused": True, "name": "x"},
    messages=(
        PlannedMessage(
            chunks=(
                Chunk(tensor="a", start=0, stop=5),
                Chunk(tensor="b", start=2, stop=3),
            )
        ),
        PlannedMessage(
            chunks=(Chunk(tensor="b", start=0, stop=2),), exchange="sparse", after=(0,)
        ),
    ),
    credit=2,
    overlap_forward=True,
    exchanges={
        "sparse": ExchangeSetting(
            compressor="topk",
            settings={"density": 0.01},
            collective="allgather_sparse",
            error_feedback=True,
        )
    },
)


def test_file_round_trip_keeps_values_and_their_types(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    back = Plan.load(tmp_path / "plan.json")
    assert back == PLAN
    assert [type(value) for value in back.settings.values()] == [int, float, bool, str]


@each(
    "entry, value, words",
    [
        ("schema_version", 2, r"schema_version: .*schema 1 is accepted"),
        (
            "messages",
            [{"chunks": [{"tensor": "a", "start": 0}]}],
            r"messages\.0\.chunks\.0\.stop",
        ),
        ("messages", [{"chunks": [], "before": [1]}], r"messages\.0\.before"),
        ("priority", 1, "priority"),
    ],
)
def test_unreadable_plans_name_the_entry(entry: str, value: object, words: str) -> None:
    text = json.dumps({**json.loads(PLAN.to_json()), entry: value})
    with pytest.raises(InvalidSetting, match=f"mine.json cannot be read: {words}"):
        Plan.parse(text, "mine.json")
