"""The link model: closed forms, and what is not a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from gradwire.cost.cluster import Cluster
from gradwire.errors import InvalidSetting


def test_a_ring_at_8_nodes_costs_the_papers_latency_and_the_links_rate() -> None:
    cluster = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
    assert cluster.alpha_s == pytest.approx(910e-6)
    assert cluster.beta_s_per_byte == pytest.approx(1.4e-9)
    assert cluster.all_reduce_s(10**9) == pytest.approx(910e-6 + 1.4)
    assert cluster.wire_bytes(800) == 1400


def test_alone_and_with_nothing_to_send_it_costs_nothing() -> None:
    assert Cluster(num_ranks=1, rate_bytes_per_s=1.0).all_reduce_s(10**9) == 0
    assert Cluster(num_ranks=1, rate_bytes_per_s=1.0).wire_bytes(10**9) == 0
    assert Cluster(num_ranks=8, rate_bytes_per_s=1.0).all_reduce_s(0) == 0


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("num_ranks", 0),
        ("rate_bytes_per_s", 0.0),
        ("rate_bytes_per_s", float("nan")),
        ("rate_bytes_per_s", float("inf")),
        ("hop_s", -1e-6),
        ("hops", 1.0),
    ],
)
def test_what_is_no_cluster_is_refused_by_entry(entry: str, value: float) -> None:
    figures = {"num_ranks": 2, "rate_bytes_per_s": 1e9, entry: value}
    with pytest.raises(ValidationError, match=entry):
        Cluster.model_validate(figures)


def test_file_round_trip_and_errors(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    cluster = Cluster(num_ranks=3, rate_bytes_per_s=0.1, hop_s=1 / 3)
    cluster.save(path)
    assert Cluster.load(path) == cluster
    path.write_text('{"num_ranks": -1, "rate_bytes_per_s": 1}')
    with pytest.raises(
        InvalidSetting, match=r"cluster.json cannot be read: num_ranks: .*holds num"
    ):
        Cluster.load(path)
