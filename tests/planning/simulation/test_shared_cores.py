"""Cores that ranks share: what messages take of them comes out of computation."""

from __future__ import annotations

import os

import pytest
import torch

from gradwire.measure.links import shared_cores
from gradwire.planning import catalogue
from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import Chunk, ExchangeSetting, Plan, PlannedMessage
from gradwire.planning.planner.auto.candidates import DEFAULT, Blend, Candidate
from gradwire.planning.planner.auto.judgement import setting_of
from gradwire.planning.planner.ddp import ddp
from gradwire.planning.price import iteration_s
from gradwire.planning.simulation.clock import run_on_clock
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.laws.inputs import profile_of
from tests.each import each
from tests.laws.sim_laws import law_one_rank_stands_for_all
from tests.planning.test_auto import cluster_of

PROFILE = profile_of(
    ([2**12], 0.25, 0.5), ([2**10], 0.25, 0.125), ([2**11], 0.25, 0.25)
)
COMPUTED_S = 0.75 + 0.875
CARRIED = LineFit(alpha_s=0.01, per_unit_s=1e-6)


def crowded(**figures: object) -> Cluster:
    return Cluster(num_ranks=4, rate_bytes_per_s=1e12, hop_s=1e-9).model_copy(
        update={"cores": 0.5, "processors": CARRIED, **figures}
    )


def test_messages_take_a_ranks_cores_from_its_model() -> None:
    """One message of 7168 elements: 1.5 times its bytes are sent, at half a core."""
    cluster = crowded()
    carried_s = (0.01 + 1e-6 * 1.5 * 4 * 7168) / 0.5
    plan = ddp(PROFILE, cluster)
    assert iteration_s(plan, PROFILE, cluster) == pytest.approx(COMPUTED_S + carried_s)
    assert simulate(plan, PROFILE, cluster).iteration_s == iteration_s(
        plan, PROFILE, cluster
    )


@each("figures", [{"cores": None}, {"processors": None}])
def test_where_cores_are_not_short_messages_take_none(figures: dict[str, None]) -> None:
    cluster = crowded(**figures)
    plan = ddp(PROFILE, cluster)
    assert iteration_s(plan, PROFILE, cluster) == pytest.approx(COMPUTED_S, rel=1e-6)


def test_where_the_link_is_slow_cores_are_free_for_messages() -> None:
    slow = crowded(rate_bytes_per_s=1e4)
    plan = ddp(PROFILE, slow)
    free = slow.model_copy(update={"cores": None})
    assert iteration_s(plan, PROFILE, slow) == iteration_s(plan, PROFILE, free)


def test_candidates_of_plans_know_of_shared_cores_too() -> None:
    update = {"cores": 0.5, "processors": CARRIED}
    cluster = cluster_of(rate=1e9).model_copy(update=update)
    free = cluster.model_copy(update={"cores": None})
    blend = Blend(PROFILE, cluster)
    candidate = Candidate(2, 2, False)
    assert blend.seconds(candidate) > Blend(PROFILE, free).seconds(candidate) + 0.02
    assert blend.seconds(candidate) == pytest.approx(
        iteration_s(blend.plan(candidate), PROFILE, cluster), rel=1e-3
    )


LINE = LineFit(alpha_s=2**-8, per_unit_s=0.0)
CODEC = CodecFit(encode=LINE, decode=LineFit(alpha_s=0.0, per_unit_s=0.0), merge=LINE)
ONEBIT = ExchangeSetting(
    compressor="onebit", collective="casync_ps", error_feedback=True
)


@each("overlap_forward", [False, True])
def test_the_backward_pass_waits_for_what_is_encoded_on_its_core(
    overlap_forward: bool,
) -> None:
    tensors = [t for layer in reversed(PROFILE.layers) for t in layer.tensors]
    messages = [whole(tensor.name, tensor.numel, "one") for tensor in tensors]
    plan = Plan(
        planner="test",
        model=PROFILE.model,
        messages=tuple(messages),
        overlap_forward=overlap_forward,
        exchanges={"one": ONEBIT},
    )
    free = Cluster(
        num_ranks=4, rate_bytes_per_s=2.0**20, hop_s=2**-9, codecs={"onebit": CODEC}
    )
    crowd = free.model_copy(update={"cores": 0.5})
    apart, held_up = (run_on_clock(plan, PROFILE, one) for one in (free, crowd))
    assert (apart.inline_s, held_up.inline_s) == (0.0, 3 * LINE.alpha_s)
    assert held_up.backward_end_s[0] == apart.backward_end_s[0] + held_up.inline_s
    assert held_up.lane_s + held_up.inline_s == pytest.approx(apart.lane_s)
    assert (
        apart.iteration_s < held_up.iteration_s <= apart.iteration_s + held_up.inline_s
    )
    law_one_rank_stands_for_all(simulate, plan, PROFILE, crowd)


def whole(name: str, numel: int, exchange: str) -> PlannedMessage:
    return PlannedMessage(
        chunks=(Chunk(tensor=name, start=0, stop=numel),), exchange=exchange
    )


@each("cores", [0.5, 4.0, None])
@each("latency_s", [0.0, 0.04])
def test_a_steps_own_work_comes_on_top_of_its_messages(
    latency_s: float, cores: float | None
) -> None:
    """Three gradients of one message, which nothing else is beside."""
    figures = {"latency_s": latency_s, "cores": cores, "processors": None}
    cluster = crowded(**figures)
    line = LineFit(alpha_s=2**-4, per_unit_s=2**-6)
    working = cluster.model_copy(update={"step": line})
    plan = ddp(PROFILE, cluster)
    work_s = (2**-4 + 3 * 2**-6) / (0.5 if cores == 0.5 else 1.0)
    expected_s = iteration_s(plan, PROFILE, cluster) + work_s
    assert iteration_s(plan, PROFILE, working) == pytest.approx(expected_s)
    law_one_rank_stands_for_all(simulate, plan, PROFILE, working)


@each("cores", [0.5, None])
@each("candidate", [DEFAULT, Candidate(4, 2, False), Candidate(4, 2, True)])
def test_a_search_prices_as_the_simulator_does(
    candidate: Candidate, cores: float | None
) -> None:
    profile = catalogue.load("lstm")
    cluster = cluster_of(rate=2e7, per_unit_s=1e-9).model_copy(
        update={"cores": cores, "step": LineFit(alpha_s=2**-6, per_unit_s=2**-8)}
    )
    blend = Blend(profile, cluster, "uniform", setting_of("uniform"))
    exact_s = iteration_s(blend.plan(candidate), profile, cluster)
    assert blend.seconds(candidate) == pytest.approx(exact_s, rel=0.02)


def test_ranks_of_one_machine_share_its_cores() -> None:
    """Four ranks of one machine, and a fifth on another, which has as many cores by
    itself.
    """
    count, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        crowd = shared_cores(lambda own: [list(own)] * 4 + [[0.0, *own[1:]]])
        assert crowd == count / 4
        torch.set_num_threads(1)
        alone = shared_cores(lambda own: [list(own), [0.0, *own[1:]]])
        assert alone == (None if count > 1 else 1)
    finally:
        torch.set_num_threads(threads)
