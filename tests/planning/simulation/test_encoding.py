"""Encodes inside the backward pass and ahead of a message's launch, against closed
forms.
"""

from __future__ import annotations

import pytest

from gradwire.planning.data.check import check
from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import Chunk, ExchangeSetting, Plan, PlannedMessage
from gradwire.planning.data.profile import Profile
from gradwire.planning.simulation.clock import (
    Iteration,
    encode_s,
    encodes_of,
    run_on_clock,
    without_encode,
)
from gradwire.planning.simulation.events import Traffic, play
from gradwire.planning.simulation.supersteps import Joint, Price, Superstep, Work
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.laws.inputs import MIXED, profile_of
from gradwire_lab.planner.cupcake import cupcake
from gradwire_lab.planning.explain import explain
from gradwire_lab.planning.sparse_fusion import (
    NOTHING,
    SparseCost,
    arrivals,
    best_fusion,
)
from tests.laws.fusion_laws import last_s

ENCODE = LineFit(alpha_s=2**-6, per_unit_s=2**-20)
ON_DEVICE = LineFit(alpha_s=2**-8, per_unit_s=2**-22)
CODEC = CodecFit(encode=ENCODE, decode=NOTHING, merge=NOTHING)
CLUSTER = Cluster(
    num_ranks=4, rate_bytes_per_s=2.0**20, hop_s=2**-9, codecs={"topk": CODEC}
)
THREE = profile_of(([2**12], 0.25, 0.5), ([2**10], 0.25, 0.125), ([2**11], 0.25, 0.25))


def _topk(profile: Profile, cluster: Cluster = CLUSTER, *, inline: bool = True) -> Plan:
    return cupcake(profile, cluster, compressor="topk", density=0.25, inline=inline)


def test_an_inline_encode_delays_every_layer_behind_it() -> None:
    """One message a layer: its encode stands between that layer's backward and the next
    one's.
    """
    own = Plan(
        planner="by hand",
        model="drawn",
        messages=tuple(
            PlannedMessage(
                chunks=(Chunk(tensor=name, start=0, stop=numel),),
                exchange="topk",
                inline=(name,),
            )
            for name, numel in (("t2", 2**11), ("t1", 2**10), ("t0", 2**12))
        ),
        exchanges=_topk(THREE).exchanges,
    )
    timing = run_on_clock(own, THREE, CLUSTER)
    last = 0.25 + ENCODE.seconds(2**11)
    middle = last + 0.125 + ENCODE.seconds(2**10)
    first = middle + 0.5 + ENCODE.seconds(2**12)
    assert timing.backward_end_s == [first, middle, last]
    assert timing.message_start_s[0] == last
    assert timing.inline_s == sum(map(ENCODE.seconds, (2**10, 2**11, 2**12)))
    names = [
        s.name for s in simulate(own, THREE, CLUSTER).spans if s.lane == "backward"
    ]
    assert {"encode t2[0:2048]", "layer2"} < set(names)


def test_the_device_encodes_as_fast_as_was_measured_there() -> None:
    device = CLUSTER.model_copy(update={"inline": {"topk": ON_DEVICE}})
    both = profile_of(([2**12, 2**12], 0.25, 0.5), dtypes=MIXED)  # so two messages
    timing = run_on_clock(_topk(both, device), both, device)
    assert timing.backward_end_s == [0.5 + 2 * ON_DEVICE.seconds(2**12)]


def test_the_clock_of_a_fusion_is_the_simulators() -> None:
    """What the dynamic programme minimises is when the last message ends in the
    simulation.
    """
    every, cost = arrivals(THREE), SparseCost.of(CLUSTER, "topk", 0.25)
    plan = _topk(THREE)
    timing = run_on_clock(plan, THREE, CLUSTER)
    assert max(timing.message_end_s) == pytest.approx(
        last_s(best_fusion(every, cost), cost)
    )


def test_a_message_waits_for_those_before_it_before_it_is_encoded() -> None:
    """The head of the line is ready last, so both are encoded behind its layer."""
    plan = _topk(profile_of(([64], 0.0, 1.0), ([64], 0.0, 1.0), ([64], 0.0, 1.0)))
    ahead = tuple(
        PlannedMessage(
            chunks=(Chunk(tensor=t, start=0, stop=64),), exchange="topk", inline=(t,)
        )
        for t in ("t1", "t2", "t0")
    )
    plan = plan.model_copy(update={"messages": ahead})
    profile = profile_of(([64], 0.0, 1.0), ([64], 0.0, 1.0), ([64], 0.0, 1.0))
    found = run_on_clock(plan, profile, CLUSTER)
    assert [(one.layer, one.message) for one in found.inline] == [
        (1, 0),
        (1, 1),
        (0, 2),
    ]


def test_inline_encodes_are_explained() -> None:
    said = " ".join(explain(_topk(THREE), THREE, CLUSTER))
    assert "Encoding within the backward pass makes it" in said
    beside = " ".join(explain(_topk(THREE, inline=False), THREE, CLUSTER))
    assert "Encoding within" not in beside


GATHER = Superstep((), (Joint("AllGather", (), 8, Price(0.0, 1.0)),), 8)


def _played(early: list[list[tuple[float, Work]]], ready_s: list[float]) -> list[float]:
    stages = [[(GATHER,)] * len(ready_s)]
    labels = [f"m{number}" for number in range(len(ready_s))]
    return play(Traffic(stages, [ready_s], labels, early=[early])).end_s[0]


def test_early_encodes_run_beside_the_backward_pass() -> None:
    a, b = Work("encode a", 1.0), Work("encode b", 2.0)
    assert _played([[(0.0, a), (1.0, b)]], [3.0]) == [4.0], (
        "both are done at its launch"
    )
    assert _played([[(0.0, a), (2.5, b)]], [3.0]) == [5.5], (
        "its transfer waits for the last one"
    )
    assert _played([[(0.0, b), (0.0, a)]], [1.0]) == [4.0], (
        "one lane does one at a time"
    )
    assert _played([[(0.0, Work("encode (not measured)", 0.0))]], [1.0]) == [2.0]
    # The lane takes the message that is first in the order first, once both wait.
    assert _played([[(0.5, a)], [(0.0, b)]], [2.0, 2.0]) == [4.0, 5.0]
    assert _played([[], [(0.0, a)]], [2.0, 2.5]) == [3.0, 4.0]


def test_a_message_encodes_each_tensor_where_its_plan_says() -> None:
    """Tensor by tensor: t2 in the backward pass, t1 beside it, t0 in neither, as it is
    dense.
    """
    message = PlannedMessage(
        chunks=tuple(
            Chunk(tensor=t, start=0, stop=n)
            for t, n in (("t2", 2**11), ("t1", 2**10), ("t0", 2**12))
        ),
        exchange="each",
        inline=("t2",),
        early=("t1",),
    )
    plan = Plan(
        planner="by hand",
        model="drawn",
        messages=(message,),
        exchanges={
            "each": ExchangeSetting(compressor="each", settings={"sparsifier": "topk"})
        },
    )
    check(plan, THREE)
    layer_of = {"t0": 0, "t1": 1, "t2": 2}
    both = list(encodes_of(plan, CLUSTER, layer_of, [{0, 1, 2}], ["m"]))
    inline = [one for one in both if one.is_inline]
    early = [one for one in both if not one.is_inline]
    assert [(one.layer, one.seconds) for one in inline] == [(2, ENCODE.seconds(2**11))]
    all_of_it = [{0, 1, 2}], 1, False, ["m"], ((),), inline, early
    timing = Iteration(THREE, CLUSTER, *all_of_it).timings([[(GATHER,)]])[0]
    last = 0.25 + ENCODE.seconds(2**11)
    assert timing.backward_end_s == [last + 0.125 + 0.5, last + 0.125, last]
    encode = next(span for span in timing.spans if span.lane == "compute")
    assert (encode.name, encode.start_s) == ("encode t1", last + 0.125)
    assert encode.end_s == encode.start_s + ENCODE.seconds(2**10)
    stages = (
        Superstep((Work("encode", 1.0),), (), 0),
        GATHER,
        Superstep((Work("encode", 1.0),), (), 0),
    )
    # only those before the first transfer
    assert encode_s(stages) == 1.0
    assert without_encode(stages) == stages[1:]
