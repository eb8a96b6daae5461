"""What auto's rank 0 makes of the figures that ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradwire.pilot import _measured
from gradwire.pilot._decisions import Move, Review, decide, is_worth, typical_s
from gradwire.pilot._measured import median_codecs
from gradwire.pilot._planning import (
    MOST_FACTOR,
    Proposal,
    link_factor,
    proposal,
    surveyed,
    words_of,
)
from gradwire.pilot.auto import auto
from gradwire.planning import catalogue
from gradwire.planning.data.cluster import PRIMITIVES, Cluster
from gradwire.planning.data.fit import fit_line
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.auto import judgement
from gradwire.planning.planner.ddp import ddp
from gradwire.planning.price import iteration_s
from gradwire_lab.laws.inputs import profile_of
from tests.each import each
from tests.planning.test_auto import MBIT, cluster_of

PROFILE = catalogue.load("lstm")
SAFE = partial(surveyed, "safe", False)
MEASURED = fit_line([(2**shift, 1e-3 + 2**shift * 1e-8) for shift in (12, 16, 20, 22)])


def measured() -> Cluster:
    return cluster_of(rate=500 * MBIT).model_copy(
        update={"collectives": {"all_reduce": MEASURED}}
    )


def dense_s(cluster: Cluster) -> float:
    return iteration_s(ddp(PROFILE, cluster), PROFILE, cluster)


@each("factor", [0.5, 0.8, 1.5, 3.0])
@each("cluster", [measured(), cluster_of()], ids=["measured", "by formula"])
def test_links_are_as_slow_as_dense_steps_say(cluster: Cluster, factor: float) -> None:
    """As where the rate was measured in a bad moment: 293 Mbit/s on a link of 500."""
    taken_s = dense_s(cluster.slower(factor))
    assert link_factor(PROFILE, cluster, taken_s) == pytest.approx(factor, rel=2e-3)


def test_a_plan_is_made_for_links_as_dense_steps_say() -> None:
    cluster = measured()
    taken_s = dense_s(cluster.slower(1.5))
    made = proposal(PROFILE, cluster, SAFE, taken_s=taken_s)
    assert made.dense_s == pytest.approx(taken_s, rel=2e-3)
    corrected = proposal(PROFILE, cluster.slower(1.5), SAFE)
    assert made.predicted_s == pytest.approx(corrected.predicted_s, rel=2e-3)


@each("share", [0.97, 1.0, 1.03, 0.01, 2 * MOST_FACTOR])
def test_links_stay_as_measured_where_that_is_near_enough_or_no_factor_explains_it(
    share: float,
) -> None:
    cluster = cluster_of()
    assert link_factor(PROFILE, cluster, share * dense_s(cluster)) == 1.0


def test_a_proposal_is_told_with_its_rivals() -> None:
    made = proposal(PROFILE, cluster_of(), partial(surveyed, "safe", True))
    assert made.plan is not None
    with_rivals = made._replace(rivals=((made.plan, 1.0), (made.plan, 2.0)))
    assert Proposal.of(with_rivals.announced()) == with_rivals
    assert Proposal.of(made._replace(plan=None).announced()).plan is None


def test_rivals_take_the_place_of_the_plan_one_by_one() -> None:
    slow = proposal(PROFILE, measured().slower(10.0), SAFE)
    (first, first_s), *others = slow.rivals
    one = slow.next_rival()
    assert (one.plan, one.predicted_s, one.rivals) == (first, first_s, tuple(others))
    assert one.words == words_of(first)
    assert one.dense_s == slow.dense_s


def test_a_compressor_that_is_not_installed_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert auto(fidelity="exact").compressors == ("lossless",)
    monkeypatch.setattr(judgement, "names", lambda kind: ("cast16", "uniform"))
    assert auto(fidelity="exact").compressors == ()
    assert auto(fidelity="safe").compressors == ("cast16", "uniform")


def test_costs_of_compressors_are_the_medians_of_all_ranks() -> None:
    """In the order of figures: encode, decode and merge of the first, each by its two
    terms.
    """
    rows = [[float(10 * rank + place) for place in range(12)] for rank in (1, 9, 2)]
    found = median_codecs(("int8", "fp8"), rows)
    assert list(found) == ["int8", "fp8"]
    lines = [getattr(fit, key) for fit in found.values() for key in PRIMITIVES]
    assert [(line.alpha_s, line.per_unit_s) for line in lines] == [
        (20.0 + place, 21.0 + place) for place in range(0, 12, 2)
    ]


class _Watched:
    """Layers of one rank, which computed for so long in each step."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = [(seconds_s, inf) for seconds_s in seconds]
        self.num_steps, self.other_s = len(seconds), 0.5

    def profile(self) -> Profile:
        return profile_of(([64], 0.5, 1.0))


def test_layers_take_what_each_step_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that take turns in being slow, by 3 s and by 2 s: each step takes 3
    s.
    """
    other = _Watched(3.0, 2.0, 3.0, 0.0)

    def of_all(engine: object, own: Sequence[float]) -> list[list[float]]:
        return [list(own), [1.5, 4.0, *(one for one, _ in other.seconds)]]

    monkeypatch.setattr(_measured, "figures_of_all", of_all)
    monkeypatch.setattr(_measured, "shared_cores", lambda of_all: None)
    monkeypatch.setattr(_measured, "announced_by", lambda engine, src, own: own)
    engine: Any = SimpleNamespace(world=2)
    watched: Any = _Watched(2.0, 3.0, 2.0, 0.0)
    found = _measured.shared_layers(engine, watched, 3.5)
    assert found.profile is not None
    assert (found.profile.forward_s, found.profile.backward_s) == (0.75, 1.5)
    assert (found.other_s, found.dense_s) == (0.75, 4.0)


def test_a_rank_that_waits_for_its_cores_computes_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At half a core a second of a core's work takes two, and what is beyond was a
    message's.
    """
    monkeypatch.setattr(
        _measured, "shared_cores", lambda of_all: 0.5 * torch.get_num_threads()
    )
    engine: Any = None
    steps_s = [(3.0, 1.0), (1.5, 1.0), (3.0, inf)]
    assert _measured.computing_s(engine, steps_s) == [2.0, 1.5, 3.0]


# ---- What auto decides follows from figures alone ------------------------------------


PLANNED = {"is_planned": True, "dense_s": 0.4, "expected_s": 0.1, "planned_s": 0.1}
NEW = {**PLANNED, "expected_s": None}
UNTRIED = {**NEW, "planned_s": None}
"""A plan whose steps nobody knows yet, and one that was not compared with dense steps
either.
"""
TRIAL = {**PLANNED, "is_planned": False, "is_trial": True}
DENSE = {"is_planned": False, "dense_s": 0.4, "expected_s": 0.4}
CASES = {
    "a plan as fast as ever": ({**PLANNED, "step_s": 0.11}, Move.STAY),
    "a plan's first steps": ({**NEW, "step_s": 0.1}, Move.EXPECT),
    "a plan that seems not to gain": ({**NEW, "step_s": 0.4}, Move.PROBE),
    "a plan that does not gain": ({**NEW, "step_s": 0.4, "slowness": 1.0}, Move.DENSE),
    "a plan whose link became slower": (
        {**NEW, "step_s": 2.0, "slowness": 20.0},
        Move.PLAN,
    ),
    "a plan with a rival": ({**NEW, "step_s": 0.1, "rival_s": 0.12}, Move.TRY_RIVAL),
    "a plan that does not gain, and a rival that may": (
        {**NEW, "step_s": 0.5, "rival_s": 0.3},
        Move.TRY_RIVAL,
    ),
    "a rival that is out of reach": (
        {**NEW, "step_s": 0.1, "rival_s": 0.13},
        Move.EXPECT,
    ),
    "a rival that would not gain over dense": (
        {**NEW, "step_s": 0.39, "rival_s": 0.39},
        Move.EXPECT,
    ),
    "a plan that seems not to gain, on the same link": (
        {**UNTRIED, "step_s": 0.4, "slowness": 1.0},
        Move.TRY_DENSE,
    ),
    "a plan that gains little": ({**UNTRIED, "step_s": 0.36}, Move.TRY_DENSE),
    "a plan that gains little, and did so beside dense steps": (
        {**NEW, "step_s": 0.36},
        Move.EXPECT,
    ),
    "a rival that is as fast": ({**NEW, "step_s": 0.1, "best_s": 0.1}, Move.EXPECT),
    "a rival that is slower": ({**NEW, "step_s": 0.11, "best_s": 0.1}, Move.BACK),
    "a rival that is slower, with another that may be as fast as the best": (
        {**NEW, "step_s": 0.2, "rival_s": 0.12, "best_s": 0.1},
        Move.TRY_RIVAL,
    ),
    "a rival that is slower, with another out of reach of the best": (
        {**NEW, "step_s": 0.2, "rival_s": 0.13, "best_s": 0.1},
        Move.BACK,
    ),
    "a rival slower than dense, and a plan that is not": (
        {**NEW, "step_s": 0.5, "best_s": 0.1},
        Move.BACK,
    ),
    "a plan and a rival that do not gain": (
        {**NEW, "step_s": 0.5, "best_s": 0.6, "slowness": 1.0},
        Move.DENSE,
    ),
    "slower than it was": ({**PLANNED, "step_s": 0.2}, Move.PROBE),
    "faster than it was": ({**PLANNED, "step_s": 0.05}, Move.PROBE),
    "a little slower than it was": ({**PLANNED, "step_s": 0.15}, Move.WAIT),
    "a little slower, again": (
        {**PLANNED, "step_s": 0.15, "was_off": True},
        Move.PROBE,
    ),
    "a little faster than it was": ({**PLANNED, "step_s": 0.07}, Move.WAIT),
    "dense, a little slower": ({**DENSE, "step_s": 0.6}, Move.WAIT),
    "slower, where steps often are so": (
        {**PLANNED, "step_s": 0.14, "off": 1.5},
        Move.STAY,
    ),
    "much slower, where steps differ": (
        {**PLANNED, "step_s": 0.2, "off": 2.0},
        Move.PROBE,
    ),
    "the rate has halved": ({**PLANNED, "step_s": 0.2, "slowness": 2.0}, Move.PLAN),
    "the rate has doubled": ({**PLANNED, "step_s": 0.05, "slowness": 0.5}, Move.PLAN),
    "slower on the same link": (
        {**PLANNED, "step_s": 0.2, "slowness": 1.1},
        Move.TRY_DENSE,
    ),
    "time to compare": (
        {**PLANNED, "step_s": 0.1, "is_trial_due": True},
        Move.TRY_DENSE,
    ),
    "a trial that the plan wins": ({**TRIAL, "step_s": 0.4}, Move.RETURN),
    "a trial that dense wins": ({**TRIAL, "step_s": 0.1, "slowness": 1.0}, Move.DENSE),
    "a trial that is off": ({**TRIAL, "step_s": 0.1}, Move.PROBE),
    "a trial on another link": ({**TRIAL, "step_s": 0.1, "slowness": 0.2}, Move.PLAN),
    "means that are near enough": (
        {**PLANNED, "step_s": 0.1, "error": 0.4, "allowed": 0.5},
        Move.STAY,
    ),
    "means too far from dense ones": (
        {**PLANNED, "step_s": 0.1, "error": 0.6, "allowed": 0.5},
        Move.STRICTER,
    ),
    "dense as ever": ({**DENSE, "step_s": 0.39, "is_trial_due": True}, Move.STAY),
    "dense, slower": ({**DENSE, "step_s": 0.8}, Move.PROBE),
    "dense, slower on the same link": (
        {**DENSE, "step_s": 0.8, "slowness": 1.0},
        Move.EXPECT,
    ),
    "dense on another link": ({**DENSE, "step_s": 0.8, "slowness": 20.0}, Move.PLAN),
}


@each("name", CASES)
def test_the_move_follows_from_the_reviewed_and_is_said_where_it_changes_the_run(
    name: str,
) -> None:
    review, move = CASES[name]
    decision = decide(Review(**review))
    assert decision.move is move
    assert bool(decision.why) is (
        move not in (Move.STAY, Move.WAIT, Move.EXPECT, Move.PROBE, Move.TRY_DENSE)
    )


def test_not_to_compress_is_a_normal_answer() -> None:
    assert is_worth(0.3, 0.4)
    assert not is_worth(0.395, 0.4)
    assert not is_worth(0.5, 0.4)


def test_a_pause_is_no_slower_step_and_a_slower_link_is() -> None:
    assert typical_s([0.1] * 6 + [30.0, 40.0]) == 0.1
    assert typical_s([2.0] * 6 + [0.1, 0.1]) == 2.0
