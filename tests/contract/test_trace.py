"""Traces are ordered, can be cut and joined, survive a file, and are drawn without
overlaps.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.contract.trace.chrome import TOUCHING_S, save_chrome, slots, to_chrome
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


# ---- Chrome's form: times in microseconds, a process a rank --------------------------

EXAMPLE = Trace.of(
    [
        Span(
            1, "communication", "send", 10.5, 10.75, size_bytes=4096, step=3, message=2
        ),
        Span(1, "communication", "recv", 10.6, 10.8),
        Span(0, "backward", "layer 1", 10.0, 10.5, step=3),
    ]
)


several = st.builds(
    lambda rank, lane, start, length: Span(
        rank, lane, "x", start / 64, (start + length) / 64
    ),
    st.integers(0, 2),
    st.sampled_from(LANES),
    st.integers(0, 300),
    st.integers(0, 40),
)
traces = st.lists(several, max_size=30).map(Trace.of)


def _of_kind(trace: Trace, phase: str) -> list[dict[str, Any]]:
    return [event for event in to_chrome(trace)["traceEvents"] if event["ph"] == phase]


def _thread_names(trace: Trace) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in _of_kind(trace, "M")
        if event["name"] == "thread_name"
    }


def test_spans_that_touch_within_rounding_share_a_thread() -> None:
    almost = [
        Span(0, "compute", "a", 0, 1),
        Span(0, "compute", "b", 1 - TOUCHING_S / 2, 2),
    ]
    assert slots(almost) == [0, 0]
    overlap = [
        Span(0, "compute", "a", 0, 1),
        Span(0, "compute", "b", 1 - 3 * TOUCHING_S, 2),
    ]
    assert slots(overlap) == [0, 1]


@given(traces)
def test_every_span_is_drawn_once_where_nothing_else_is(trace: Trace) -> None:
    events = _of_kind(trace, "X")
    assert len(events) == len(trace.spans)
    names = _thread_names(trace)
    threads = defaultdict(list)
    for event in events:
        threads[event["pid"], event["tid"]].append(event)
        assert names[event["pid"], event["tid"]].split()[0] == event["cat"]
        assert event["ts"] >= 0
    for drawn in threads.values():
        drawn.sort(key=lambda event: (event["ts"], event["dur"]))
        for first, second in pairwise(drawn):
            assert first["ts"] + first["dur"] <= second["ts"] + 1e-3


@given(traces)
def test_no_more_threads_than_spans_open_at_once(trace: Trace) -> None:
    for place in trace.lanes():
        lane = [span for span in trace.spans if (span.rank, span.lane) == place]
        used = max(slots(lane)) + 1
        starts = [span.start_s for span in lane]
        open_at_once = max(
            sum(s.start_s <= at < s.end_s for s in lane) for at in starts
        )
        assert used <= max(1, open_at_once)


def test_lanes_have_names_and_overlaps_have_threads_of_their_own() -> None:
    names = sorted(_thread_names(EXAMPLE).values())
    assert names == ["backward", "communication 0", "communication 1"]
    ranks = [
        e["args"]["name"] for e in _of_kind(EXAMPLE, "M") if e["name"] == "process_name"
    ]
    assert ranks == ["rank 0", "rank 1"]


def test_an_event_carries_what_the_span_says() -> None:
    (event,) = (event for event in _of_kind(EXAMPLE, "X") if event["name"] == "send")
    assert (event["pid"], event["cat"]) == (1, "communication")
    assert event["ts"] == 0.5e6
    assert event["dur"] == 0.25e6
    assert event["args"] == {"size_bytes": 4096, "step": 3, "message": 2}


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
        for save in (TRACE.save, lambda to: save_chrome(TRACE, to)):
            with pytest.raises(InvalidSetting, match=r"cannot be written: .*; "):
                save(beyond)


@each("save", [Trace.save, save_chrome], ids=["save", "save_chrome"])
def test_a_reader_of_the_old_file_never_sees_a_part_of_the_new(
    save: Any, tmp_path: Path
) -> None:
    folder = tmp_path / save.__name__
    folder.mkdir()
    path = folder / "trace.json"
    before = folder / "before.json"
    path.write_text("what a reader has opened")
    before.hardlink_to(path)
    save(TRACE, path)
    assert before.read_text() == "what a reader has opened"
    assert sorted(folder.iterdir()) == [before, path]


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
