"""Seconds in which a simulated iteration has something on its link, and stretches of a
lane.
"""

from __future__ import annotations

from collections.abc import Iterable

from gradwire.contract.trace.span import Span
from gradwire.planning.simulation.clock import Timing


def link_s(timing: Timing) -> float:
    """Seconds in which some message is on the link, hidden or not."""
    if timing.spans:
        return sum(
            end_s - start_s
            for start_s, end_s in merged(timing.spans, "communication", 0)
        )
    pairs = zip(timing.message_start_s, timing.message_end_s, strict=True)
    return sum(end_s - start_s for start_s, end_s in united(pairs))


def merged(
    spans: Iterable[Span], lane: str, from_s: float
) -> list[tuple[float, float]]:
    """The stretches of time from a second on in which a lane works, ascending."""
    own = ((max(from_s, one.start_s), one.end_s) for one in spans if one.lane == lane)
    return united(pair for pair in own if pair[0] < pair[1])


def united(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The stretches of time that given ones cover, ascending, none overlapping."""
    found: list[tuple[float, float]] = []
    for start_s, end_s in sorted(stretches):
        if found and start_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end_s))
        else:
            found.append((start_s, end_s))
    return found
