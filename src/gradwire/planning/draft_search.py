"""The search for a blend's best draft: a climb, number by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .drafts import Blend, Draft, SecondPart

CREDITS = (1, 2, 4)
NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SHARES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 0.7, 0.85, 1.0)
"""Values that are tried: of messages at once, of messages, and of the bytes that stay dense."""
SWEEPS = 3
"""The most times that each number of a draft is tried anew."""

FIRST = tuple(
    Draft(share, 2, count, True, 2, False) for share in (0.0, 0.3) for count in (2, 8, 24)
)
"""The drafts that tell which of several blends are worth a climb."""


def first_seconds(blend: Blend) -> float:
    """The least seconds of the first drafts."""
    return min(blend.seconds(draft) for draft in FIRST)


SECOND_PARTS = tuple(
    SecondPart(share, is_last) for is_last in (False, True) for share in SHARES[1:-1:2]
)
"""Parts that are tried of a blend's second exchange."""


def best_of_two(blend: Blend, start: Draft) -> tuple[float, Draft]:
    """The draft of least seconds with a second exchange that a climb from ``start`` finds.

    Only where some part of it gains at all the rest is gone into.
    """
    drafts = [
        start._replace(second=part, num_second=max(1, round(part.share * start.num_pieces)))
        for part in SECOND_PARTS
    ]
    seconds, best = min((blend.seconds(draft), draft) for draft in drafts)
    if seconds >= blend.seconds(start):
        return seconds, best
    values: dict[str, Sequence[Any]] = {
        "dense_share": SHARES,
        "num_pieces": NUMBERS,
        "num_second": NUMBERS,
        "second": SECOND_PARTS,
    }
    return _climb(blend, best, values)


def best_draft(blend: Blend, *, overlaps: Sequence[bool]) -> tuple[float, Draft]:
    """The draft of least seconds that a climb finds, number by number."""
    values: dict[str, Sequence[Any]] = {
        "overlap_forward": overlaps,
        "num_pieces": NUMBERS,
        "credit": CREDITS,
        "dense_share": SHARES,
        "num_dense": NUMBERS,
        "vectors_last": (True, False),
    }
    return _climb(blend, Draft(0.0, 4, 4, True, 2, overlaps[0]), values)


def _climb(blend: Blend, best: Draft, values: Mapping[str, Sequence[Any]]) -> tuple[float, Draft]:
    known = {best: blend.seconds(best)}
    for _ in range(SWEEPS):
        before = best
        for name, tried in values.items():
            for value in tried:
                other = best._replace(**{name: value})
                if other not in known:
                    known[other] = blend.seconds(other)
            best = min(known, key=lambda one: (known[one], one))
        if best == before:
            break
    return known[best], best
