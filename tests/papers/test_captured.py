"""Schemes over index sets of a file: what is read, what rows say, and a small run for
real.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from papers.zen import captured
from papers.zen.captured_rank import SCHEMES
from tests.bench.testbed.forked import fork_ranks

pytestmark = pytest.mark.slow

NUM_UNITS, WIDTH = 300, 4


def write(path: Path, hosts: int) -> Path:
    """An index set for each host: some rows of its own, and row 7 of all."""
    sets = {
        f"units_{rank}": np.array([rank, 7, 290 + rank], np.int32)
        for rank in range(hosts)
    }
    np.savez(
        path, name=np.array("table"), num_units=np.array(NUM_UNITS), width=WIDTH, **sets
    )
    return path


def result(seconds: float, sent: int, received: int) -> dict[str, Any]:
    one = {"seconds": [seconds], "sent_bytes": [sent], "received_bytes": [received]}
    dense = {"seconds": [8.0], "sent_bytes": [1], "received_bytes": [1]}
    return {"numel": 100, "density": 0.5, "schemes": {"dense": dense, "zen": one}}


@pytest.mark.parametrize("shaped", [True, False])
def test_a_step_is_the_slowest_ranks_and_bytes_are_the_busiest_sides(
    shaped: bool,
) -> None:
    bench = captured.CapturedBench(paths=(), hosts=2, rate_bytes_per_s=100.0)
    results = [result(2.0, 10, 150), result(4.0, 90, 20)]
    row = captured._rows(bench, "table", results, shaped)[1]
    assert (row["step_s"], row["speedup_vs_dense"]) == (4.0, 2.0)
    assert row["busiest_bytes"] == (150 if shaped else None)
    assert row["time_vs_floor"] == (pytest.approx(4.0 / 1.5) if shaped else None)


def test_every_scheme_averages_alike_among_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks themselves hold every mean to the all-reduce's."""
    fork_ranks(monkeypatch, captured)
    bench = captured.CapturedBench(
        paths=(write(tmp_path / "a.npz", 2),), hosts=2, repeats=1
    )
    rows = captured.run(bench, lambda fraction, what: None, timeout_s=120.0)
    assert [row["scheme"] for row in rows] == ["dense", *SCHEMES]
    assert {row["fraction_density"] for row in rows} == {3 / NUM_UNITS}
    assert all(row["step_s"] > 0 for row in rows)  # type: ignore[operator]
