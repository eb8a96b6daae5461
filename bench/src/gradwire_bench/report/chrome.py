"""A trace in the Chrome trace event format, which https://ui.perfetto.dev opens.

Source: "Trace Event Format" (Google, 2016), complete events ("X") and metadata events
("M"). A process is a rank and a thread is a lane. Viewers draw the events of one thread
as a call stack, so spans of a lane that overlap get threads of their own. The elements
that each step selected and the bytes that it sent are counters ("C"), which viewers
draw as curves.
"""

import heapq
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.contract.files import write_text
from gradwire.contract.trace.span import Span, StepDensity, Trace

TOUCHING_S = 1e-9
"""The overlap in seconds below which two spans follow each other, as sums of clock
readings are rounded that far.
"""


def slots(spans: Sequence[Span]) -> list[int]:
    """For every span, by start, the lowest slot that no open span holds.

    >>> slots([Span(0, "lane", "name", start_s, start_s + 2) for start_s in range(3)])
    [0, 1, 0]
    """
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    chosen = []
    for span in spans:
        while busy and busy[0][0] <= span.start_s + TOUCHING_S:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slot = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (span.end_s, slot))
        chosen.append(slot)
    return chosen


def to_chrome(trace: Trace) -> dict[str, Any]:
    """The trace as Chrome/Perfetto JSON, in microseconds from the first span on."""
    zero_s = min((span.start_s for span in trace.spans), default=0.0)
    lanes: dict[tuple[int, str], list[Span]] = {place: [] for place in trace.lanes()}
    for span in trace.spans:
        lanes[span.rank, span.lane].append(span)
    events = []
    for rank in sorted({span.rank for span in trace.spans}):
        events += _names("process", rank, 0, f"rank {rank}", rank)
    next_thread: dict[int, int] = {}
    for (rank, lane), spans in lanes.items():
        places = slots(spans)
        num_slots = max(places) + 1
        first = next_thread.get(rank, 0)
        next_thread[rank] = first + num_slots
        for slot in range(num_slots):
            name = lane if num_slots == 1 else f"{lane} {slot}"
            events += _names("thread", rank, first + slot, name, first + slot)
        events += [
            _event(span, first + slot, zero_s)
            for span, slot in zip(spans, places, strict=True)
        ]
    events += [
        counter for density in trace.densities for counter in _counters(density, zero_s)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_chrome(trace: Trace, path: Path | str) -> None:
    """Writes ``to_chrome(trace)`` to a file, which is replaced at once if it is there.

    Raises ``InvalidSetting`` where it cannot be written.
    """
    write_text(path, json.dumps(to_chrome(trace)))


def _event(span: Span, thread: int, zero_s: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "pid": span.rank,
        "tid": thread,
        "ts": (span.start_s - zero_s) * 1e6,
        "dur": span.duration_s * 1e6,
        "args": {
            "size_bytes": span.size_bytes,
            "step": span.step,
            "message": span.message,
        },
    }


def _counters(density: StepDensity, zero_s: float) -> list[dict[str, Any]]:
    place = {"ph": "C", "pid": density.rank, "ts": (density.end_s - zero_s) * 1e6}
    shares = {"local": density.local, "actual": density.actual}
    if density.asked_density is not None:
        shares = {"asked": density.asked_density, **shares}
    return [
        {**place, "name": "density", "args": shares},
        {**place, "name": "sent bytes a step", "args": {"sent": density.sent_bytes}},
    ]


def _names(
    what: str, rank: int, thread: int, name: str, place: int
) -> list[dict[str, Any]]:
    common = {"ph": "M", "pid": rank, "tid": thread}
    return [
        {**common, "name": f"{what}_name", "args": {"name": name}},
        {**common, "name": f"{what}_sort_index", "args": {"sort_index": place}},
    ]
