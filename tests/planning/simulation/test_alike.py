"""Many ranks that all do the same: one is priced as all are when they are played."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest

from gradwire.collective.casync_ps import casync_ps
from gradwire.collective.zen import zen
from gradwire.compress.topk import topk
from gradwire.contract import Exchange
from gradwire.contract.spec import CHUNK_ALIGNMENT, TensorSpec, squarest
from gradwire.contract.verbs import AllReduce
from gradwire.exchange.by_name import by_name
from gradwire.exchange.pair import Pair
from gradwire.exchange.two_level import on_hosts
from gradwire.planning.data.cluster import Cluster, CodecFit, Host
from gradwire.planning.data.fit import LineFit
from gradwire.planning.simulation.events import Traffic, play
from gradwire.planning.simulation.representative import (
    MANY,
    alone,
    estimate,
    supersteps_by_stretches,
    supersteps_of_alike,
)
from gradwire.planning.simulation.supersteps import Superstep, Tariff, supersteps_of
from tests.each import each
from tests.laws.cases import name_of, other_ways, own_exchanges, pairs
from tests.planning.profiles import measured
from tests.planning.simulation.test_events import Says

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


HOSTS = Cluster(
    num_ranks=5 * 4,
    rate_bytes_per_s=1e6,
    host=Host(num_ranks=4, rate_bytes_per_s=1e8),
)
SIZES = (1, 30 * EVEN + 5, 3000 * EVEN + 5)
"""Chunks are empty but for one, go at once, or go in rounds; the last of several is short."""


def law_stretches_are_each_of_their_ranks(
    exchange: Exchange, cluster: Cluster, sizes: Sequence[int] = SIZES
) -> None:
    """Ranks of which one stands for its neighbours do what they do when each is asked."""
    exchange = on_hosts(exchange, cluster.ranks_per_host)
    tariff = Tariff.of(exchange, cluster)
    for numel in sizes:
        shapes = squarest(numel, 6) if exchange.declared.whole_tensors else ()
        spec = TensorSpec("", numel, shapes=shapes)
        found = supersteps_by_stretches(exchange, spec, tariff)
        for own, truth in zip(found, supersteps_of(exchange, spec, tariff), strict=True):
            assert len(own) == len(truth)
            for one, other in zip(own, truth, strict=True):
                assert one._replace(wire=()) == other._replace(wire=())
                assert sorted(map(repr, one.wire)) == sorted(map(repr, other.wire))


def way_of(exchange: Exchange) -> Hashable:
    """What decides who sends how much to whom."""
    if isinstance(exchange, Pair):
        return exchange.collective, exchange.codec.traits.exact_size
    return type(exchange)


EVERY = {way_of(made): made for made in (*pairs(), *own_exchanges(), *other_ways())}
FEW = [
    one
    for one in (*pairs(), *other_ways())
    if isinstance(one.codec, topk) and isinstance(one.collective, casync_ps | zen)
]


@each("exchange", FEW, ids=name_of)
def test_stretches(exchange: Exchange) -> None:
    law_stretches_are_each_of_their_ranks(exchange, measured(CLUSTER))


@pytest.mark.slow
@each("exchange", EVERY.values(), ids=name_of)
def test_stretches_of_all(exchange: Exchange) -> None:
    law_stretches_are_each_of_their_ranks(exchange, measured(CLUSTER))
    law_stretches_are_each_of_their_ranks(exchange, measured(HOSTS), SIZES[1:2])


def test_the_law_of_stretches_bites() -> None:
    """A rank amid others that all do the same is not asked."""
    law_stretches_are_each_of_their_ranks(Says(lambda *me: [AllReduce(me[-1])]), CLUSTER)
    longer = Says(lambda rank, _, grad_N: [AllReduce(grad_N)] * (1 + (rank == 5)))
    with pytest.raises(AssertionError):
        law_stretches_are_each_of_their_ranks(longer, CLUSTER)
