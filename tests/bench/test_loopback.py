"""``bench loopback``: what its rows compare."""

from __future__ import annotations

import pytest

from gradwire_bench.runs import loopback


@pytest.mark.smoke
def test_sides_are_compared_within_turns_by_their_slowest_rank() -> None:
    bench = loopback.LoopbackBench(turns=3, compressors=("onebit",))
    assert bench.rows == ["ddp", "onebit", "ddp+onebit"]
    own = [
        {
            "seconds": [[1.0, 2.0], [2.0, 2.0], [9.0, 9.0]],
            "processor_s": [0.1, 0.1, 0.5],
            "switches": [20.0, 20.0, 90.0],
            "calls": [500.0, 500.0, 900.0],
        },
        {
            "seconds": [[2.0, 1.0], [1.0, 1.0], [1.0, 1.0]],
            "processor_s": [0.2, 0.2, 0.2],
            "switches": [30.0, 30.0, 30.0],
            "calls": [600.0, 600.0, 600.0],
        },
    ]
    row = loopback._row(bench, "onebit", [1.0, 1.0, 18.0], own)
    assert row["step_s"] == 2.0
    assert row["speedup_vs_ddp"] == 0.5  # of 0.5, 0.5 and 2
    assert row["processor_s"] == pytest.approx(0.2)
    assert row["switches"] == 30.0
    assert row["calls"] == 600.0
