"""Traces in the form of Chrome: times in microseconds, a process a rank."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.contract.trace.span import LANES, Span, Trace
from gradwire.errors import InvalidSetting
from gradwire_bench.report.chrome import TOUCHING_S, save_chrome, slots, to_chrome

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


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, "a\x00b"):
        with pytest.raises(InvalidSetting, match=r"cannot be written: .*; "):
            save_chrome(EXAMPLE, path)


def test_a_reader_of_the_old_file_never_sees_a_part_of_the_new(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    before = tmp_path / "before.json"
    path.write_text("what a reader has opened")
    before.hardlink_to(path)
    save_chrome(EXAMPLE, path)
    assert before.read_text() == "what a reader has opened"
    assert sorted(tmp_path.iterdir()) == [before, path]
