"""One rank that stands for all is priced as all are when they are played."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from torch import Tensor

from gradwire.contract import Exchange
from gradwire.contract.spec import CHUNK_ALIGNMENT, TensorSpec, squarest
from gradwire.contract.verbs import AllReduce, Recv, Send, Verb
from gradwire.exchange.by_name import by_name
from gradwire.exchange.pair import Pair
from gradwire.exchange.two_level import on_hosts
from gradwire.planning.data.cluster import Cluster, CodecFit, Host
from gradwire.planning.data.fit import LineFit
from gradwire.planning.simulation import representative
from gradwire.planning.simulation.events import Traffic, play
from gradwire.planning.simulation.representative import MOST_ASKED, alone, estimate
from gradwire.planning.simulation.supersteps import Superstep, Tariff, supersteps_of
from tests.each import each
from tests.laws.cases import name_of, other_ways, own_exchanges, pairs
from tests.planning.profiles import measured
from tests.planning.simulation.test_events import Row, Says

WORLD = 16
LINE = LineFit(alpha_s=2e-5, per_unit_s=5e-10)
CLUSTER = Cluster(
    num_ranks=WORLD,
    rate_bytes_per_s=1.25e8,
    codecs=dict.fromkeys(
        ("onebit", "topk"), CodecFit(encode=LINE, decode=LINE, merge=LINE)
    ),
)
EVEN = CHUNK_ALIGNMENT * WORLD
ALIKE = [("onebit", "casync_ring"), ("topk", "sparse_ps"), ("topk", "zen")]


def _played_s(every: list[tuple[Superstep, ...]], ranks_per_host: int = 1) -> float:
    ranks = [[own] for own in every]
    traffic = Traffic(ranks, [[0.0]] * len(every), [""], ranks_per_host=ranks_per_host)
    return max(end_s[0] for end_s in play(traffic).end_s)


@each("numel", [EVEN, 300 * EVEN], ids=["few", "many"])
@each("compressor, collective", [*ALIKE, ("topk", "sparcml")])
def test_one_rank_takes_as_long_as_every_rank(
    compressor: str, collective: str, numel: int
) -> None:
    """Whether payloads are small and go at once, or go in rounds."""
    exchange, spec = by_name(compressor, {}, collective), TensorSpec("", numel)
    tariff = Tariff.of(exchange, CLUSTER)
    every_s = _played_s(supersteps_of(exchange, spec, tariff))
    assert _played_s([alone(exchange, spec, tariff)]) == pytest.approx(
        every_s, rel=1e-9
    )


def test_aggregators_that_are_few_are_played() -> None:
    """They have other supersteps than the ranks that send to them."""
    exchange = by_name("topk", {}, "casync_ps", collective_settings={"partitions": 2})
    spec, tariff = TensorSpec("", 300 * EVEN), Tariff.of(exchange, CLUSTER)
    every_s = _played_s(supersteps_of(exchange, spec, tariff))
    assert _played_s([alone(exchange, spec, tariff)]) == pytest.approx(
        every_s, rel=1e-9
    )


@each("compressor, collective", [*ALIKE, ("topk", "allgather_sparse")])
def test_a_curve_is_near_what_is_played(compressor: str, collective: str) -> None:
    """Sizes at which rank 0 was looked at, and others, within 10 % of what one message
    takes.
    """
    exchange = by_name(compressor, {}, collective)
    tariff = Tariff.of(exchange, CLUSTER)
    for numel in (3 * 4**9, 4**12 + 7):
        spec = TensorSpec("", numel)
        seconds = _played_s([estimate(exchange, numel, spec.dtype, tariff)])
        assert seconds == pytest.approx(
            _played_s([alone(exchange, spec, tariff)]), rel=0.1
        )


HOSTS = Cluster(
    num_ranks=5 * 4,
    rate_bytes_per_s=1e6,
    host=Host(num_ranks=4, rate_bytes_per_s=1e8),
)


def way_of(exchange: Exchange) -> Hashable:
    """What decides who sends how much to whom."""
    if isinstance(exchange, Pair):
        return exchange.collective, exchange.codec.traits.exact_size
    return type(exchange)


EVERY = {way_of(made): made for made in (*pairs(), *own_exchanges(), *other_ways())}


def law_one_rank_takes_as_long_as_all(exchange: Exchange, cluster: Cluster) -> None:
    """Chunks of a gradient are there as one, as several and some empty ones, and as a
    short one.
    """
    exchange = on_hosts(exchange, cluster.ranks_per_host)
    tariff = Tariff.of(exchange, cluster)
    for numel in (1, 100, 30 * EVEN + 5, 3000 * EVEN + 5)[
        :: 1 + exchange.declared.whole_tensors
    ]:
        shapes = squarest(numel, 6) if exchange.declared.whole_tensors else ()
        spec = TensorSpec("", numel, shapes=shapes)
        with pytest.MonkeyPatch.context() as patch:
            # no rank stands for others unplayed
            patch.setattr(representative, "ALIKE", 0.0)
            slowest_s = _played_s([alone.__wrapped__(exchange, spec, tariff)])
        all_s = _played_s(supersteps_of(exchange, spec, tariff), cluster.ranks_per_host)
        assert _played_s([alone(exchange, spec, tariff)]) == pytest.approx(
            slowest_s, rel=NEAR
        )
        assert slowest_s == pytest.approx(all_s, rel=FOLDED)


NEAR, FOLDED = 0.02, 0.04
"""What a rank may be off that stands for others; and what folding a stretch of verbs
may lose.
"""


@each(
    "exchange",
    [by_name("topk", {}, name) for name in ("casync_ps", "zen")],
    ids=name_of,
)
def test_of_parts_that_are_uneven(exchange: Exchange) -> None:
    law_one_rank_takes_as_long_as_all(exchange, measured(CLUSTER))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(500)
@each("exchange", EVERY.values(), ids=name_of)
def test_one_rank_of_every_exchange_takes_as_long_as_all(exchange: Exchange) -> None:
    law_one_rank_takes_as_long_as_all(exchange, measured(CLUSTER))
    law_one_rank_takes_as_long_as_all(exchange, measured(HOSTS))


def test_the_law_bites() -> None:
    """A rank amid others that all do the same is not asked."""
    law_one_rank_takes_as_long_as_all(Says(lambda *me: [AllReduce(me[-1])]), CLUSTER)

    many = CLUSTER.model_copy(update={"num_ranks": 4 * MOST_ASKED})

    def also_sends(rank: int, _: int, grad_N: Tensor) -> list[Row]:
        more: dict[int, Verb] = {5: Send(6, grad_N), 6: Recv(5, grad_N)}
        return [AllReduce(grad_N), *([more[rank]] if rank in more else [])]

    with pytest.raises(AssertionError):
        law_one_rank_takes_as_long_as_all(Says(also_sends), many)
