"""``runs/send_flips.py``: bits flip in real sends, and verdicts tell what became of the ranks."""

from __future__ import annotations

import pytest

from gradwire_bench.runs.send_flips import Outcome, Trial, judged, measure

RIGHT, WRONG = Outcome("", (), "", 7, 9), Outcome("", (), "", 8, 9)
NAMED, OTHER = (Outcome("RankFailed", (rank,), "", 0, 5) for rank in (2, 1))


@pytest.mark.parametrize(
    ("ends", "codes", "verdict"),
    [
        ([RIGHT, RIGHT, RIGHT], [0, 0, 0], "no effect"),
        ([WRONG, WRONG, WRONG], [0, 0, 0], "wrong"),
        ([RIGHT, WRONG, RIGHT], [0, 0, 0], "diverged"),
        ([NAMED, NAMED, NAMED], [0, 0, 0], "named"),
        ([RIGHT, NAMED, RIGHT], [0, 0, 0], "named"),
        ([WRONG, NAMED, RIGHT], [0, 0, 0], "noticed"),
        ([NAMED, OTHER, NAMED], [0, 0, 0], "noticed"),
        ([None, NAMED, NAMED], [-6, 0, 0], "killed"),
        ([None, NAMED, NAMED], [-9, 0, 0], "hung"),
    ],
)
def test_verdicts(ends: list[Outcome | None], codes: list[int], verdict: str) -> None:
    assert judged(Trial(0, "ring", True, victim=2), 7, ends, codes, "payload 50 of 56") == verdict


@pytest.mark.multi
@pytest.mark.slow
def test_flips_are_refused_by_name_with_checksums_alone() -> None:
    plain, _, sealed, _ = measure(6, 1, 2, lambda told: None)  # the first six are of payloads
    assert sealed["named"] == 6
    assert plain["named"] == 0
    assert (plain["wrong"], plain["diverged"]) != (0, 0)
