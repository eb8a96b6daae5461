"""What auto decides follows from figures alone."""

from __future__ import annotations

from gradwire.runtime.pilot._decisions import Move, Review, decide, is_worth, typical_s
from tests.each import each

PLANNED = {"is_planned": True, "dense_s": 0.4, "expected_s": 0.1, "planned_s": 0.1}
NEW = {**PLANNED, "expected_s": None}
UNTRIED = {**NEW, "planned_s": None}
"""A plan whose steps nobody knows yet, and one that was not compared with dense steps either."""
TRIAL = {**PLANNED, "is_planned": False, "is_trial": True}
DENSE = {"is_planned": False, "dense_s": 0.4, "expected_s": 0.4}
CASES = {
    "a plan as fast as ever": ({**PLANNED, "step_s": 0.11}, Move.STAY),
    "a plan's first steps": ({**NEW, "step_s": 0.1}, Move.EXPECT),
    "a plan that seems not to gain": ({**NEW, "step_s": 0.4}, Move.PROBE),
    "a plan that does not gain": ({**NEW, "step_s": 0.4, "slowness": 1.0}, Move.DENSE),
    "a plan whose link became slower": ({**NEW, "step_s": 2.0, "slowness": 20.0}, Move.PLAN),
    "a plan with a rival": ({**NEW, "step_s": 0.1, "rival_s": 0.12}, Move.TRY_RIVAL),
    "a plan that does not gain, and a rival that may": (
        {**NEW, "step_s": 0.5, "rival_s": 0.3},
        Move.TRY_RIVAL,
    ),
    "a rival that is out of reach": ({**NEW, "step_s": 0.1, "rival_s": 0.13}, Move.EXPECT),
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
    "a little slower, again": ({**PLANNED, "step_s": 0.15, "was_off": True}, Move.PROBE),
    "a little faster than it was": ({**PLANNED, "step_s": 0.07}, Move.WAIT),
    "dense, a little slower": ({**DENSE, "step_s": 0.6}, Move.WAIT),
    "slower, where steps often are so": ({**PLANNED, "step_s": 0.14, "off": 1.5}, Move.STAY),
    "much slower, where steps differ": ({**PLANNED, "step_s": 0.2, "off": 2.0}, Move.PROBE),
    "the rate has halved": ({**PLANNED, "step_s": 0.2, "slowness": 2.0}, Move.PLAN),
    "the rate has doubled": ({**PLANNED, "step_s": 0.05, "slowness": 0.5}, Move.PLAN),
    "slower on the same link": ({**PLANNED, "step_s": 0.2, "slowness": 1.1}, Move.TRY_DENSE),
    "time to compare": ({**PLANNED, "step_s": 0.1, "is_trial_due": True}, Move.TRY_DENSE),
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
    "dense, slower on the same link": ({**DENSE, "step_s": 0.8, "slowness": 1.0}, Move.EXPECT),
    "dense on another link": ({**DENSE, "step_s": 0.8, "slowness": 20.0}, Move.PLAN),
}


@each("name", CASES)
def test_the_move_follows_from_the_reviewed_and_is_said_where_it_changes_the_run(name: str) -> None:
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
