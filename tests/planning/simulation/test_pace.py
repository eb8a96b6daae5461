"""A backward pass that a busy compute lane slows down, against closed forms and its own walk."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import Chunk, ExchangeSetting, Plan, PlannedMessage
from gradwire.planning.drafts import DEFAULT, Blend
from gradwire.planning.price import iteration_s
from gradwire.planning.simulation.clock import Pace
from gradwire.planning.simulation.events import Traffic, play
from gradwire.planning.simulation.supersteps import Joint, Price, Superstep, Work
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.laws.inputs import profile_of
from tests.each import each
from tests.laws.sim_laws import law_one_rank_stands_for_all
from tests.strategies import bounded

LINE = LineFit(alpha_s=2**-8, per_unit_s=0.0)
CODEC = CodecFit(encode=LINE, decode=LineFit(alpha_s=0.0, per_unit_s=0.0), merge=LINE)
PROFILE = profile_of(([2**12], 0.25, 0.5), ([2**10], 0.25, 0.125), ([2**11], 0.25, 0.25))
SECONDS = st.one_of(st.just(0.0), st.floats(1e-3, 1))
SETTING = ExchangeSetting(compressor="onebit", collective="casync_ps", error_feedback=True)


def cluster_of(beside: float) -> Cluster:
    codecs = {"onebit": CODEC}
    return Cluster(num_ranks=4, rate_bytes_per_s=2.0**20, hop_s=2**-9, codecs=codecs, beside=beside)


def plan_of(*, overlap_forward: bool) -> Plan:
    tensors = [t for layer in reversed(PROFILE.layers) for t in layer.tensors]
    messages = tuple(
        PlannedMessage(chunks=(Chunk(tensor=t.name, start=0, stop=t.numel),), exchange="one")
        for t in tensors
    )
    return Plan(
        planner="test",
        model=PROFILE.model,
        messages=messages,
        overlap_forward=overlap_forward,
        exchanges={"one": SETTING},
    )


def test_a_lane_that_takes_the_core_holds_the_backward_pass_up() -> None:
    """Messages are ready at 1 and 2 where nothing is encoded; an encode takes 0.5."""
    encode = Superstep((Work("encode", 0.5),), (), 0)
    wire = Superstep((), (Joint("AllReduce", (), 1, Price(0.0, 0.25)),), 1)
    found = {
        beside: play(
            Traffic([[(encode, wire)] * 2], [[1.0, 2.0]], ["a", "b"], 2, beside=beside)
        ).start_s[0]
        for beside in (1.0, 0.5, 0.0)
    }
    assert found == {1.0: [1.0, 2.0], 0.5: [1.0, 2.25], 0.0: [1.0, 2.5]}


@bounded(40)
@given(
    gaps_s=st.lists(SECONDS, min_size=1, max_size=8),
    works_s=st.lists(SECONDS, min_size=8, max_size=8),
    beside=st.sampled_from((0.0, 0.3, 0.999)),
)
def test_messages_start_where_the_walk_past_the_lanes_spans_ends(
    gaps_s: list[float], works_s: list[float], beside: float
) -> None:
    """The engine takes the pace moment by moment, ``Pace`` from what the lane did in the end."""
    ready_s = list(accumulate(gaps_s))
    courses = [(Superstep((Work("encode", own_s),), (), 0),) for own_s in works_s[: len(ready_s)]]
    played = play(Traffic([courses], [ready_s], [""] * len(ready_s), 8, beside=beside))
    pace = Pace.of(played.spans, beside)
    assert played.start_s[0] == pytest.approx([pace.end_s(0.0, own_s) for own_s in ready_s])


@each("overlap_forward", [False, True])
@each("beside", [0.0, 0.5])
def test_one_rank_stands_for_all_and_waits_for_no_more_than_the_lane(
    beside: float, overlap_forward: bool
) -> None:
    plan = plan_of(overlap_forward=overlap_forward)
    law_one_rank_stands_for_all(simulate, plan, PROFILE, cluster_of(beside))
    slow_s, fast_s = (iteration_s(plan, PROFILE, cluster_of(one)) for one in (beside, 1.0))
    lane_s = 3 * (2 * LINE.alpha_s + 3 * LINE.alpha_s)
    assert fast_s < slow_s <= fast_s + (1 - beside) * lane_s


@each("beside", [0.0, 0.5, 1.0])
def test_a_search_prices_as_the_simulator_does(beside: float) -> None:
    blend = Blend(PROFILE, cluster_of(beside), "onebit", SETTING)
    exact_s = iteration_s(blend.plan(DEFAULT), PROFILE, cluster_of(beside))
    assert blend.seconds(DEFAULT) == pytest.approx(exact_s, rel=0.02)
