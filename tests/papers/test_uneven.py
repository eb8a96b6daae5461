"""Ranks of uneven speeds: the rows that a run makes, here on the loopback."""

from __future__ import annotations

from typing import Any

import pytest

from papers.local_steps.uneven import SIDES, measure
from tests.runtime.ranks import Ranks


def _rows(rank: int, world: int) -> list[Any]:
    return [measure(side, 4, 0.001) for side in SIDES]


@pytest.mark.slow
def test_each_side_makes_its_steps() -> None:
    ranks = Ranks(2)
    try:
        rows, others = ranks.run(_rows)
    finally:
        ranks.close()
    assert [row["side"] for row in rows] == [*SIDES]
    for row, other in zip(rows, others, strict=True):
        assert row == other
        assert row["steps"] >= 8
        assert 0 < row["useful"] < 1
