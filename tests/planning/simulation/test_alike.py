"""Many ranks that all do the same: one is priced as all are when they are played."""

from __future__ import annotations

import pytest

from gradwire.contract.spec import CHUNK_ALIGNMENT, TensorSpec
from gradwire.exchange.by_name import by_name
from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire.planning.simulation.events import Traffic, play
from gradwire.planning.simulation.representative import (
    MANY,
    alone,
    estimate,
    supersteps_of_alike,
)
from gradwire.planning.simulation.supersteps import Superstep, Tariff, supersteps_of
from tests.each import each

LINE = LineFit(alpha_s=2e-5, per_unit_s=5e-10)
CLUSTER = Cluster(
    num_ranks=MANY,
    rate_bytes_per_s=1.25e8,
    codecs=dict.fromkeys(("onebit", "topk"), CodecFit(encode=LINE, decode=LINE, merge=LINE)),
)
EVEN = CHUNK_ALIGNMENT * MANY
ALIKE = [
    ("onebit", "casync_ring"),
    ("topk", "sparse_ps"),
    ("topk", "zen"),
]


def _played_s(every: list[tuple[Superstep, ...]]) -> float:
    outcome = play(Traffic([[own] for own in every], [[0.0]] * len(every), [""]))
    return max(end_s[0] for end_s in outcome.end_s)


@each("numel", [EVEN, 300 * EVEN], ids=["few", "many"])
@each("compressor, collective", ALIKE)
def test_one_stands_for_all(compressor: str, collective: str, numel: int) -> None:
    """Whether payloads are small and go at once, or go in rounds."""
    exchange, spec = by_name(compressor, {}, collective), TensorSpec("", numel)
    tariff = Tariff.of(exchange, CLUSTER)
    assert supersteps_of_alike(exchange, spec, tariff) is not None
    every_s = _played_s(supersteps_of(exchange, spec, tariff))
    assert _played_s([alone(exchange, spec, tariff)]) == pytest.approx(every_s, rel=1e-9)


@each(
    "collective, numel, num_ranks",
    [("casync_ps", 300 * EVEN + 1, MANY), ("sparcml", EVEN, MANY), ("casync_ps", EVEN, MANY - 1)],
    ids=["unequal chunks", "partners", "few ranks"],
)
def test_those_that_differ_are_played(collective: str, numel: int, num_ranks: int) -> None:
    cluster = CLUSTER.model_copy(update={"num_ranks": num_ranks})
    exchange = by_name("topk", {}, collective)
    spec, tariff = TensorSpec("", numel), Tariff.of(exchange, cluster)
    assert supersteps_of_alike(exchange, spec, tariff) is None
    every_s = _played_s(supersteps_of(exchange, spec, tariff))
    assert _played_s([alone(exchange, spec, tariff)]) == pytest.approx(every_s, rel=1e-9)


@each("compressor, collective", [*ALIKE, ("topk", "allgather_sparse")])
def test_a_curve_is_near_what_is_played(compressor: str, collective: str) -> None:
    """Sizes at which rank 0 was looked at, and others, within 10 % of what one message takes."""
    exchange = by_name(compressor, {}, collective)
    tariff = Tariff.of(exchange, CLUSTER)
    for numel in (3 * 4**9, 4**12 + 7):
        spec = TensorSpec("", numel)
        seconds = _played_s([estimate(exchange, numel, spec.dtype, tariff)])
        assert seconds == pytest.approx(_played_s([alone(exchange, spec, tariff)]), rel=0.1)
