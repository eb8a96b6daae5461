"""simulate and simulate_exchange: closed forms, what traces say, what is refused, and
speed.
"""

from __future__ import annotations

import pytest
import torch

from gradwire.collective.casync_ps import casync_ps
from gradwire.collective.ring import ring
from gradwire.compress.cast16 import cast16
from gradwire.compress.none import none
from gradwire.compress.onebit import onebit
from gradwire.contract.registry import load
from gradwire.errors import InvalidSetting
from gradwire.exchange.pair import pair
from gradwire.planning import catalogue
from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import ExchangeSetting, Plan
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.collective.casync_ring import casync_ring
from gradwire_lab.laws.inputs import profile_of
from papers.one_exchange import simulate_exchange
from tests.calls import num_calls
from tests.each import each
from tests.planning.profiles import exact_cluster

HOP_S, RATE = 2**-9, 2**20
PROFILE = profile_of(([2**12], 0.25, 0.5), ([2**12], 0.25, 0.5))


@each("world", [3, 8])
@each("collective", [ring(), casync_ring(), casync_ps()])
def test_dense_exchanges_take_the_ring_all_reduces_time(collective, world: int) -> None:
    """2(N-1)(hop + n/N/rate), hop by hop or by collectives, when N divides n."""
    numel = world * 2**10
    cluster = exact_cluster(num_ranks=world)
    trace = simulate_exchange(pair(none(), collective), numel, cluster)
    expected_s = 2 * (world - 1) * (HOP_S + 4 * numel / world / RATE)
    assert trace.iteration_s == pytest.approx(expected_s, rel=1e-13)
    assert world & (world - 1) or trace.iteration_s == expected_s, (
        "powers of two are exact"
    )
    assert trace.iteration_s == pytest.approx(
        cluster.all_reduce_s(4 * numel), rel=1e-13
    )


ENCODE = LineFit(alpha_s=2**-12, per_unit_s=2**-24)
MERGE = LineFit(alpha_s=2**-13, per_unit_s=2**-25)
DECODE = LineFit(alpha_s=2**-14, per_unit_s=2**-26)
CODEC = CodecFit(encode=ENCODE, merge=MERGE, decode=DECODE)
"""Three lines, no multiple of which is another's."""


@each("world", [2, 8])
@each("collective", [casync_ring(), casync_ps()])
def test_casync_takes_its_closed_form(collective, world: int) -> None:
    """2(N-1)(hop + m/rate) for payloads of m bytes a chunk, and the codec's time.

    HiPress, table 3: the ring encodes N chunks, merges N - 1 and decodes one beside
    which nothing travels. The server encodes all chunks but its own, and the mean of
    its own; merges what arrived and what it has, N chunks; and decodes all but its own,
    which it does beside the pull.
    """
    chunk = 2**13
    numel = world * chunk
    cluster = exact_cluster(num_ranks=world).model_copy(
        update={"codecs": {"onebit": CODEC}}
    )
    trace = simulate_exchange(pair(onebit(block=65536), collective), numel, cluster)
    wire_s = 2 * (world - 1) * (HOP_S + (2**10 + 8) / RATE)
    assert DECODE.seconds(chunk) < HOP_S, (
        "a ring's other decodes hide behind their hops"
    )
    if isinstance(collective, casync_ring):
        codec_s = world * ENCODE.seconds(chunk) + (world - 1) * MERGE.seconds(chunk)
        codec_s += DECODE.seconds(chunk)
    else:
        codec_s = (
            ENCODE.seconds(numel - chunk) + MERGE.seconds(numel) + ENCODE.seconds(chunk)
        )
        codec_s += DECODE.seconds(numel - chunk)
    assert trace.iteration_s == wire_s + codec_s


def test_sixteen_bit_gradients_take_half_the_bytes() -> None:
    cluster = exact_cluster(num_ranks=4)
    full = simulate_exchange(pair(none(), ring()), 2**12, cluster)
    half = simulate_exchange(pair(none(), ring()), 2**12, cluster, torch.bfloat16)
    rounded = simulate_exchange(pair(cast16(), ring()), 2**12, cluster)
    sent = [trace.only(lambda s: s.rank == 0).spans for trace in (full, half, rounded)]
    assert [sum(s.size_bytes for s in spans) for spans in sent] == [24576, 12288, 12288]


def _sparse(plan: Plan) -> Plan:
    messages = tuple(m.model_copy(update={"exchange": "sparse"}) for m in plan.messages)
    sparse = ExchangeSetting(
        compressor="topk",
        settings={"density": 0.25},
        collective="allgather_sparse",
        error_feedback=True,
    )
    return plan.model_copy(
        update={"messages": messages, "exchanges": {"sparse": sparse}}
    )


@each("ranks", ["one", "all"])
def test_what_was_measured_is_on_the_compute_lane(ranks) -> None:
    line = LineFit(alpha_s=2**-8, per_unit_s=2**-16)
    other = LineFit(alpha_s=2**-7, per_unit_s=2**-18)
    codecs = {"topk": CodecFit(encode=line, decode=line, merge=other)}
    cluster = exact_cluster(num_ranks=4).model_copy(update={"codecs": codecs})
    trace = simulate(_sparse(wfbp(PROFILE, cluster)), PROFILE, cluster, ranks=ranks)
    spans = [s for s in trace.spans if s.rank == 0 and s.message == 1]
    encode_s, merge_s = line.seconds(2**12), other.seconds(4 * 2**12)
    sent_s = 3 * (HOP_S + 8 * 2**10 / RATE)
    assert [(s.lane, s.name, s.start_s, s.duration_s) for s in spans] == [
        ("compute", "encode", 1.0, encode_s),
        ("communication", "t0[0:4096]", 1.0 + encode_s, sent_s),
        ("compute", "merge", 1.0 + encode_s + sent_s, merge_s),
    ]
    assert trace.iteration_s == 1.0 + encode_s + sent_s + merge_s + 0.5


def test_ranks_that_mean_nothing_are_refused() -> None:
    plan = wfbp(PROFILE, exact_cluster())
    with pytest.raises(InvalidSetting, match="'one' or 'all'"):
        simulate(plan, PROFILE, exact_cluster(), ranks="some")  # type: ignore[arg-type]


@each("name", ["omgs", "wfbp"])  # all-gathers, and dense
def test_resnet50_on_128_ranks_is_quick(name: str) -> None:
    """About 5 ms and 13,000 calls for one rank, half a second and 1.3 million calls for
    all.
    """
    profile = catalogue.load("resnet50")
    cluster = Cluster(num_ranks=128, rate_bytes_per_s=1.25e9)
    plan = load("planner", name)(profile, cluster)
    one = simulate(plan, profile, cluster)
    found = []

    def play_all() -> None:
        found.append(simulate(plan, profile, cluster, ranks="all"))

    assert num_calls(lambda: simulate(plan, profile, cluster)) < 50_000
    assert num_calls(play_all) < 4e6
    assert found[0].iteration_s == pytest.approx(one.iteration_s, rel=1e-12)
