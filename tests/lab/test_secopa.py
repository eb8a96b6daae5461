"""secopa: equations 1 and 2 against a reading of their own, and what follows for a
plan.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.collective.casync_ps import casync_ps
from gradwire.compress.onebit import onebit
from gradwire.errors import InvalidSetting
from gradwire.exchange.by_name import servers_of
from gradwire.exchange.planned import exchanges_of
from gradwire.planning import catalogue
from gradwire.planning.data.cluster import Cluster, CodecFit, Host
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import DENSE, ExchangeSetting, Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.simulation.clock import Demand
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.compress.dgc import dgc
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.planner.secopa import secopa
from gradwire_lab.planning.all_ranks import all_ranks
from gradwire_lab.planning.casync_cost import MOST_BATCHES, CaSyncCost, LeastCost
from tests.each import each
from tests.planning.profiles import exact_cluster, profiles
from tests.strategies import bounded

figures = st.floats(1e-6, 1e-3)
slopes = st.floats(1e-13, 1e-9)
lines = st.builds(LineFit, alpha_s=figures, per_unit_s=slopes)


def cost_of(
    num_ranks: int,
    send: LineFit,
    encode: LineFit,
    decode: LineFit,
    *,
    is_ring: bool = False,
    servers: int = 0,
) -> CaSyncCost:
    codec = CodecFit(encode=encode, decode=decode, merge=decode)
    return CaSyncCost(num_ranks, is_ring, send, codec, servers=servers)


def by_hand_s(cost: CaSyncCost, numel: int, payload_bytes: float, k: int) -> float:
    """Equation 2 as it is printed, for one K: tables 2 and 3, where aggregators beside
    workers have section 6.1's numbers.
    """
    n = cost.num_ranks
    batches = math.ceil(k / (cost.servers or n))
    alpha, beta, gamma = batches * 2 * (n - 1), k, n
    if cost.servers:
        alpha, beta, gamma = batches * 2 * n, k + 1, n + 1
    if cost.is_ring:
        beta, gamma = batches * n, batches * n
    codec = cost.codec
    decodes_s = gamma * codec.decode.seconds(numel / k)
    return alpha * cost.send.seconds(payload_bytes / k) + (
        beta * codec.encode.seconds(numel / k) + decodes_s
    )


@bounded(60)
@given(
    num_ranks=st.sampled_from((2, 3, 4, 16)),
    send=lines,
    encode=lines,
    decode=lines,
    servers=st.sampled_from((-1, 0, 1, 2, 8)),
    numel=st.integers(1, 10**8),
)
def test_the_choice_is_the_best_of_all(
    num_ranks: int,
    send: LineFit,
    encode: LineFit,
    decode: LineFit,
    servers: int,
    numel: int,
) -> None:
    """Of every K, compressed and not; the smallest of those that are as fast.

    With -1 servers it is a ring.
    """
    is_ring = servers < 0
    servers = max(0, servers)
    cost = cost_of(num_ranks, send, encode, decode, is_ring=is_ring, servers=servers)
    aggregators = servers or num_ranks
    alpha = 2 * num_ranks if servers else 2 * (num_ranks - 1)
    every = range(1, MOST_BATCHES * aggregators + 1)
    small_s = {k: by_hand_s(cost, numel, numel / 8, k) for k in every}
    plain_s = {
        k: math.ceil(k / aggregators) * alpha * send.seconds(4 * numel / k)
        for k in every
    }
    choice = cost.choose(numel, 4 * numel, numel / 8)
    found = small_s if choice.is_compressed else plain_s
    assert choice.seconds == pytest.approx(min((*small_s.values(), *plain_s.values())))
    assert found[choice.num_partitions] == pytest.approx(choice.seconds)
    assert all(
        found[k] > choice.seconds * (1 + 1e-13) for k in range(1, choice.num_partitions)
    )


def test_low_rank_is_never_cut() -> None:
    """Its two factors are summed on the way: two encodes, one decode, and twice the
    transfers.
    """
    send = LineFit(alpha_s=1e-5, per_unit_s=1e-9)
    encode, decode = (LineFit(alpha_s=a, per_unit_s=1e-12) for a in (1e-4, 2e-4))
    codec = CodecFit(encode=encode, decode=decode, merge=decode)
    cost = CaSyncCost(4, True, send, codec, is_low_rank=True)
    choice = cost.choose(10**7, 4 * 10**7, 10**5)
    computes_s = 2 * encode.seconds(10**7) + decode.seconds(10**7)
    assert choice == (True, 1, pytest.approx(12 * send.seconds(5e4) + computes_s))


@each("is_ring, announced", [(True, 8), (False, 14)])
def test_payloads_that_vary_take_the_transfers_of_their_sizes(
    is_ring: bool, announced: int
) -> None:
    """8 bytes each: N on a ring of N, and as many as there are payloads by servers."""
    cluster = cluster_of(8)
    same, varied = (
        CaSyncCost.of(
            cluster,
            CODEC,
            is_ring=is_ring,
            traits=replace(dgc.traits, exact_size=exact),
        )
        for exact in (True, False)
    )
    for num_K, batches in ((1, 1), (8, 1), (9, 2)):
        seconds = [
            cost.compressed_each_s(10**6, 1e4, np.array([num_K]))
            for cost in (same, varied)
        ]
        more_s = batches * announced * cluster.line("send").measured_s(8)
        assert seconds[1] - seconds[0] == pytest.approx(more_s)


ENCODE = LineFit(alpha_s=2e-5, per_unit_s=2e-11)
CODEC = CodecFit(encode=ENCODE, decode=ENCODE, merge=ENCODE)


def cluster_of(
    num_ranks: int = 8, rate: float = 1.25e9, *, codec: CodecFit = CODEC
) -> Cluster:
    codecs = dict.fromkeys(("onebit", "dgc", "powersgd", "cast16"), codec)
    return Cluster(
        num_ranks=num_ranks, rate_bytes_per_s=rate, hop_s=2e-5, codecs=codecs
    )


def _compressed(plan: Plan) -> dict[str, int]:
    """The number of messages of each compressed tensor."""
    found: dict[str, int] = {}
    for message in plan.messages:
        if message.exchange != DENSE:
            for chunk in message.chunks:
                found[chunk.tensor] = found.get(chunk.tensor, 0) + 1
    return found


def test_large_tensors_are_compressed_and_small_ones_share_messages() -> None:
    profile = catalogue.load("vgg16")
    plan = secopa(profile, cluster_of())
    numels = {t.name: t.numel for layer in profile.layers for t in layer.tensors}
    compressed = _compressed(plan)
    rest = [numel for name, numel in numels.items() if name not in compressed]
    assert min(numels[name] for name in compressed) > max(rest)
    assert len(plan.messages) < len(numels)
    assert plan.exchanges["onebit"].error_feedback
    assert (
        not secopa(profile, cluster_of(), compressor="cast16")
        .exchanges["cast16"]
        .error_feedback
    )
    dense = secopa(profile, cluster_of(rate=1e14))
    assert not _compressed(dense)
    assert dense.exchanges == {}


def test_fewer_partitions_than_ranks_are_one_message_of_so_many() -> None:
    """An encode that costs much however short it is: few partitions, which are carried
    out.
    """
    encode = LineFit(alpha_s=2e-3, per_unit_s=1e-12)
    nothing = LineFit(alpha_s=0.0, per_unit_s=0.0)
    codec = CodecFit(encode=encode, decode=nothing, merge=nothing)
    cluster, profile = (
        cluster_of(8, codec=codec),
        profile_of(([5 * 10**6, 8 * 10**6], 0.1, 0.1)),
    )
    cost = CaSyncCost.of(cluster, codec, is_ring=False, traits=onebit.traits)
    plan = secopa(profile, cluster)
    exchanges = exchanges_of(plan)
    numels = {t.name: t.numel for layer in profile.layers for t in layer.tensors}
    for message in plan.messages:
        (chunk,) = message.chunks
        numel = chunk.numel
        assert numel == numels[chunk.tensor]
        payload_bytes = numel / 8 + 8 * numel / 512
        chosen = cost.choose(numel, 4 * numel, payload_bytes).num_partitions
        assert 1 <= chosen < 8
        assert message.exchange == f"onebit in {chosen}"
        assert exchanges[message.exchange].inner.collective == casync_ps(
            partitions=chosen
        )
    assert len(plan.exchanges) == len({message.exchange for message in plan.messages})
    one, all_ = (
        simulate(plan, profile, cluster, ranks=ranks) for ranks in ("one", "all")
    )
    assert all_.iteration_s == pytest.approx(one.iteration_s, rel=0.1)


def test_a_last_batch_has_the_partitions_that_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five partitions on four ranks: four fifths of the tensor, and a message of one
    partition.
    """
    monkeypatch.setattr(CaSyncCost, "choose", lambda *_: LeastCost(True, 5, 1.0))
    plan = secopa(profile_of(([1003], 0.1, 0.1)), cluster_of(4))
    assert [one.exchange for one in plan.messages] == ["onebit", "onebit in 1"]
    cuts = [(chunk.start, chunk.stop) for one in plan.messages for chunk in one.chunks]
    assert cuts == [(0, 802), (802, 1003)]


NOTHING = LineFit(alpha_s=0.0, per_unit_s=0.0)
EVERY = cluster_of(
    4, 1e7, codec=CodecFit(encode=NOTHING, decode=NOTHING, merge=NOTHING)
)
"""A slow link, and a codec that takes no time: every tensor is compressed."""
SMALL = profile_of(*[([3000, 5000], 0.1, 0.1)] * 6)


def _shared(plan: Plan) -> list[int]:
    return [len(message.chunks) for message in plan.messages]


def test_small_compressed_gradients_share_messages_but_sparsified_do_not() -> None:
    plan = secopa(SMALL, EVERY, bulk_bytes=40_000)
    assert _shared(plan) == [3, 3, 3, 3]
    assert set(_compressed(plan).values()) == {1}
    assert len(_compressed(plan)) == 12
    assert _shared(secopa(SMALL, EVERY, bulk_bytes=1)) == [1] * 12
    # A sparsifier would see one vector, and take other elements of it.
    assert _shared(secopa(SMALL, EVERY, compressor="dgc", density=0.01)) == [1] * 12
    matrices = catalogue.load("resnet50"), cluster_of(rate=1e7)
    low_rank = secopa(*matrices, compressor="powersgd", collective="allreduce")
    small = [one for one in low_rank.messages if one.exchange == "powersgd"]
    assert max(len(message.chunks) for message in small) > 1


def test_who_shares_a_message_has_the_partitions_of_the_sum() -> None:
    encode = LineFit(alpha_s=1e-3, per_unit_s=1e-12)
    cluster = cluster_of(
        8, codec=CodecFit(encode=encode, decode=NOTHING, merge=NOTHING)
    )
    profile = profile_of(*[([10**6], 0.1, 0.1)] * 5)
    cost = CaSyncCost.of(
        cluster, cluster.codecs["onebit"], is_ring=False, traits=onebit.traits
    )
    payload_bytes = 10**6 / 8 + 8 * 10**6 / 128
    alone, all_ = (
        cost.choose(n * 10**6, 4 * n * 10**6, n * payload_bytes) for n in (1, 5)
    )
    assert alone.is_compressed
    assert alone.num_partitions < all_.num_partitions < 8
    (message,) = secopa(profile, cluster, bulk_bytes=2**30).messages
    assert message.exchange == f"onebit in {all_.num_partitions}"


@bounded(20)
@given(profile=profiles(largest=20_000), num_ranks=st.sampled_from((2, 3, 8)))
def test_messages_are_of_the_size_asked_for(profile: Profile, num_ranks: int) -> None:
    """A message holds at least so many bytes, but for the last one of each dtype."""
    plan = secopa(profile, cluster_of(num_ranks), bulk_bytes=20_000)
    sizes = {t.name: t for layer in profile.layers for t in layer.tensors}
    small = [
        {sizes[c.tensor].dtype for c in message.chunks}
        for message in plan.messages
        if message.exchange == DENSE
        and sum(sizes[c.tensor].size_bytes for c in message.chunks) < 20_000
    ]
    assert all(len(dtypes) == 1 for dtypes in small)
    assert len(set.union(*small)) == len(small) if small else True


@each("num_ranks, servers", [(3, 1), (5, 2), (8, 3)])
def test_all_messages_go_to_servers_of_their_own(num_ranks: int, servers: int) -> None:
    """Also the uncompressed ones; and the plan is carried out by the simulator."""
    profile = catalogue.load("vgg16")
    cluster = cluster_of(num_ranks)
    plan = secopa(profile, cluster, servers=servers)
    exchanges = exchanges_of(plan)
    used = {message.exchange for message in plan.messages}
    assert "uncompressed" in used
    assert len(used) > 1
    for name in used:
        assert servers_of(exchanges[name]) == servers
    demand = Demand.of(plan, profile, cluster)
    trains = [1.0] * (num_ranks - servers) + [0.0] * servers
    timings = all_ranks(demand, trains)
    workers = [timing.iteration_s for timing in timings[: num_ranks - servers]]
    assert min(workers) > sum(layer.forward_s for layer in profile.layers)


@each("servers, partitions", [(1, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_the_simulator_takes_the_seconds_of_equation_1(
    servers: int, partitions: int
) -> None:
    """Four workers, and a server for each partition: 2 N transfers of m / K bytes."""
    workers = 4
    numel = 4096 * 4
    profile = profile_of(([numel], 0.0, 0.0))
    cluster = exact_cluster(num_ranks=workers + servers)
    given = {"servers": servers, "partitions": partitions, "room_bytes": 0}
    setting = ExchangeSetting(
        compressor="none", collective="casync_ps", collective_settings=given
    )
    (message,) = wfbp(profile, cluster).messages
    plan = Plan(
        planner="test",
        model=profile.model,
        messages=(message.model_copy(update={"exchange": "served"}),),
        exchanges={"served": setting},
    )
    times = all_ranks(Demand.of(plan, profile, cluster))
    cost = CaSyncCost(workers, False, cluster.line("send"), CODEC, servers=servers)
    (printed_s,) = cost.plain_each_s(4 * numel, np.array([float(partitions)]))
    measured_s = max(timing.iteration_s for timing in times)
    # K - 1 transfers fill and empty the pipeline
    most = 1 + 2 * (partitions - 1) / (2 * workers)
    assert printed_s * (1 - 1e-9) <= measured_s <= most * printed_s * (1 + 1e-9)


@each(
    "settings, words",
    [
        ({"servers": 8}, "servers must be fewer than the ranks"),
        ({"servers": 1, "collective": "casync_ring"}, "by casync_ps"),
        ({"servers": 0}, "servers must be"),
        ({"compressor": "qsgd"}, "gradwire profile"),
        ({"collective": "allreduce"}, "collective of onebit must be 'casync_ps' or"),
        ({"compressor": "powersgd"}, "collective of powersgd must be 'allreduce'"),
        (
            {"compressor": "selective"},
            "compressor must be a compressor that a collective takes",
        ),
    ],
)
def test_settings_that_there_are_not(settings: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        partial(secopa, **settings)(profile_of(([10**6], 0.1, 0.1)), cluster_of())


def test_a_rank_of_a_host_encodes_a_matrix_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of matrices that travel together each rank encodes as many elements as others."""
    asked: list[tuple[int, int, float]] = []

    def choose(cost: CaSyncCost, *figures: Any) -> LeastCost:
        asked.append(figures)
        return LeastCost(True, 1, 1.0)

    monkeypatch.setattr(CaSyncCost, "choose", choose)
    profile, flat = catalogue.load("vgg16"), cluster_of(4)
    host = Host(num_ranks=2, rate_bytes_per_s=1e9)
    hosts = flat.model_copy(update={"num_ranks": 8, "host": host})
    numels = [t.numel for layer in profile.layers for t in layer.tensors][::-1]
    low_rank = partial(
        secopa, compressor="powersgd", collective="allreduce", bulk_bytes=2**40
    )
    for cluster, count in ((flat, 1), (hosts, 2)):
        asked.clear()
        low_rank(profile, cluster)
        *alone, together = asked
        assert [numel for numel, _, _ in alone] == numels
        assert [size for _, size, _ in alone] == [
            4 * -(-numel // count) for numel in numels
        ]
        own = sum(-(-numel // count) for numel in numels)
        assert together[:2] == (max(own, *numels), 4 * own)
        payloads = [payload_bytes for _, _, payload_bytes in asked]
        if count == 1:
            whole = payloads
        assert payloads == pytest.approx([one / count for one in whole])
