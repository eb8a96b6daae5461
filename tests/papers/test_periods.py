"""Local steps by rate and period: what ranks measure, and the rows beside forecasts."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from gradwire.planning.data.cluster import Cluster
from papers.local_steps import periods
from tests.runtime.ranks import Ranks


def _found(rank: int, world: int) -> dict[str, Any]:
    periods.PERIODS = (1, 2)
    periods.STEP_S = 1e-4
    periods.SIZES_BYTES = (2**14, 2**15, 2**16)
    return periods.measure({}, lambda share, note: None)


@pytest.mark.slow
def test_ranks_measure_links_and_rounds() -> None:
    with closing(Ranks(2)) as ranks:
        found = ranks.run(_found)[0]
    assert Cluster.parse(found["cluster"]).codecs.keys() == {"uniform"}
    assert {every: len(rounds) for every, rounds in found["seconds"].items()} == {
        1: 40,
        2: 20,
    }


@pytest.mark.smoke
def test_a_row_says_how_far_a_forecast_is_off() -> None:
    rate = 1e6 * periods.PAYLOAD
    cluster = Cluster(num_ranks=4, rate_bytes_per_s=rate, hop_s=periods.HOP_S)
    text = cluster.to_json()
    first = {"cluster": text, "seconds": {"8": [1.0]}}
    (row,) = periods.rows(first, 1e6)
    assert row["stated_links_s"] == row["measured_links_s"]
    predicted_s = float(str(row["stated_links_s"]))
    # a step, and an eighth of 0.7 MB at 1 MB/s
    assert 0.025 + 0.08 < predicted_s < 0.025 + 0.1
    seconds = [8 * predicted_s, 16 * predicted_s, 32 * predicted_s]
    (other,) = periods.rows({**first, "seconds": {"8": seconds}}, 1e6)
    assert other["step_s"] == pytest.approx(2 * predicted_s)
    assert other["fraction_stated_off"] == pytest.approx(-0.5)
    assert other["most_s"] == pytest.approx(4 * predicted_s)
