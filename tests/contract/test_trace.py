"""Traces are ordered, can be cut and joined, survive a file, and are drawn without
overlaps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.contract.trace.span import LANES, Span, StepDensity, Trace
from gradwire.errors import InvalidSetting
from tests.each import each

TRACE = Trace.of(
    [
        Span(1, "wait", "step boundary", 0.5, 0.75, step=1),
        Span(0, "communication", "send", 0.25, 0.5, size_bytes=8, step=0, message=1),
        Span(0, "forward", "forward", 0.0, 0.25, step=0),
        Span(0, "own lane", "mine", 0.0, 0.125),
    ]
)


def test_a_trace_survives_a_file(tmp_path: Path) -> None:
    TRACE.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == TRACE


@each("text", ['{"schema": 99, "spans": []}', "[]", '{"spans": []}'])
def test_another_schema_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match="schema"):
        Trace.from_json(text)


def test_lanes_are_ordered_by_rank_and_by_the_order_of_a_step() -> None:
    lanes = [(0, "forward"), (0, "communication"), (0, "own lane"), (1, "wait")]
    assert TRACE.lanes() == lanes


def test_a_trace_selects_spans_by_step_and_condition() -> None:
    assert TRACE.steps() == [0, 1]
    assert [span.name for span in TRACE.only(step=0).spans] == ["forward", "send"]
    assert TRACE.only(lambda span: span.rank == 1, step=0).spans == ()


moments = st.integers(0, 64).map(lambda n: n / 64)
spans = st.builds(
    lambda lane, ends: Span(0, lane, "x", min(ends), max(ends)),
    st.sampled_from(LANES[:2]),
    st.tuples(moments, moments),
)


@given(st.lists(spans, max_size=12))
def test_busy_time_counts_every_moment_once(drawn: list[Span]) -> None:
    trace = Trace.of(drawn)
    for lane in LANES[:2]:
        covered = {
            tick
            for span in drawn
            if span.lane == lane
            for tick in range(round(span.start_s * 64), round(span.end_s * 64))
        }
        assert trace.busy_s(lane) == len(covered) / 64


@given(st.lists(spans, max_size=8), st.lists(spans, max_size=8))
def test_merging_keeps_all_spans_in_order(
    first: list[Span], second: list[Span]
) -> None:
    merged = Trace.merged([Trace.of(first), Trace.of(second)]).spans
    assert len(merged) == len(first) + len(second)
    assert [s.start_s for s in merged] == sorted(s.start_s for s in first + second)


def test_densities_are_kept_by_step_and_rank() -> None:
    made = [
        StepDensity(rank, step, 0.5, 8, 100, 1.0, 1, 2)
        for step in (1, 0)
        for rank in (1, 0)
    ]
    trace = Trace.merged([Trace.of([], made[:1]), Trace.of([], made[1:])])
    assert [(d.step, d.rank) for d in trace.densities] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert trace.only(step=1).densities == trace.densities[2:]
    assert Trace.from_json(trace.to_json()) == trace


BYTES = {
    "no UTF-8": b"\xff\xfe\x00",
    "continuation bytes": b"\x80" * 100,
    "a NUL": b"{\x00}",
}


@each("content", BYTES.values(), ids=list(BYTES))
def test_bytes_that_are_no_text_are_refused_by_name(
    content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(
        InvalidSetting, match=r"(trace\.json|a trace) cannot be read: .*; "
    ):
        Trace.load(path)


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / ("long" * 100), "a\x00b"):
        with pytest.raises(InvalidSetting, match=r"cannot be read: .*; "):
            Trace.load(path)
        beyond = path / "x" if isinstance(path, Path) and path != tmp_path else path
        with pytest.raises(InvalidSetting, match=r"cannot be written: .*; "):
            TRACE.save(beyond)


def test_a_reader_of_the_old_file_never_sees_a_part_of_the_new(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    before = tmp_path / "before.json"
    path.write_text("what a reader has opened")
    before.hardlink_to(path)
    TRACE.save(path)
    assert before.read_text() == "what a reader has opened"
    assert sorted(tmp_path.iterdir()) == [before, path]


STEP = StepDensity(0, 7, 0.5, 800, numel=10_000, asked=100.0, selected=100, arrived=380)
SAVED = json.loads(Trace.of(TRACE.spans[:1], [STEP]).to_json())
ODD: tuple[Any, ...] = (None, True, "x", [], {}, 1e400, -1e400, float("nan"), 10**400)
"""Values that no entry of a trace has, where it has no text and may not be left out."""


def with_entry(rows: str, name: str, value: Any) -> str:
    return json.dumps({**SAVED, rows: [{**SAVED[rows][0], name: value}]})


def test_each_entry_is_of_its_type_and_within_its_bounds() -> None:
    for rows in ("spans", "densities"):
        for name, sound in SAVED[rows][0].items():
            may_be = (
                (str,)
                if isinstance(sound, str)
                else (type(None),)
                if name == "asked"
                else ()
            )
            for value in ODD:
                if may_be and isinstance(value, may_be):
                    Trace.from_json(with_entry(rows, name, value))
                    continue
                with pytest.raises(InvalidSetting, match=f"{name}.*; "):
                    Trace.from_json(with_entry(rows, name, value))


@each(
    "text",
    ["", "{", "null", '{"schema": 1}', '{"schema": 1, "spans": [3]}', "[" * 100_000],
)
def test_texts_that_are_no_trace_are_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match="; "):
        Trace.from_json(text)
