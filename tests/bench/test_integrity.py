"""``runs/integrity.py``: every side trains, and the rows are compared with no
checks.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from gradwire_bench.runs import hsdp, integrity, turns
from gradwire_bench.training.tasks import make_task
from tests.runtime.ranks import Ranks

STEP_S = 0.01


def measured(rank: int, world: int) -> list[dict[str, Any]]:
    integrity.NUM_LAYERS, integrity.NUMEL, integrity.STEP_S = 2, 5000, STEP_S
    return integrity.measure(turns=1, num_steps=2)


@pytest.mark.multi
def test_each_side_has_a_row() -> None:
    with closing(Ranks(2)) as ranks:
        rows = ranks.run(measured)[0]
    assert [row["name"] for row in rows] == [*integrity.SIDES]
    assert rows[0]["fraction_overhead"] == 0.0
    assert all(row["step_s"] >= STEP_S for row in rows)


def measured_by_hsdp(rank: int, world: int) -> list[dict[str, Any]]:
    return hsdp.measure(make_task("convnet"), turns=1, num_steps=turns.WARM_UP + 1)


@pytest.mark.slow
@pytest.mark.multi
def test_each_side_of_hsdp_has_a_row() -> None:
    with closing(Ranks(4)) as ranks:
        rows = ranks.run(measured_by_hsdp)[0]
    assert [row["name"] for row in rows] == [hsdp.NATIVE, *hsdp.EXCHANGES, hsdp.ALONE]
    assert rows[0]["speedup_vs_native"] == 1.0
    assert all(row["step_s"] > 0 for row in rows)
