"""``runs/integrity.py``: every side trains, and the rows are compared with no checks."""

from __future__ import annotations

from typing import Any

import pytest

from gradwire_bench.runs import integrity
from tests.runtime.ranks import Ranks


def measured(rank: int, world: int) -> list[dict[str, Any]]:
    return integrity.measure(turns=1, num_steps=2)


@pytest.mark.multi
def test_a_row_a_side() -> None:
    ranks = Ranks(2)
    try:
        rows = ranks.run(measured)[0]
    finally:
        ranks.close()
    assert [row["name"] for row in rows] == [*integrity.SIDES]
    assert rows[0]["fraction_overhead"] == 0.0
    assert all(row["step_s"] >= integrity.STEP_S for row in rows)
