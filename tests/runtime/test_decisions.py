"""What auto decides follows from figures alone."""

from __future__ import annotations

from gradwire.runtime.pilot._decisions import Move, Review, decide, is_worth, typical_s
from tests.each import each

PLANNED = {"is_planned": True, "dense_s": 0.4, "expected_s": 0.1, "planned_s": 0.1}
DENSE = {"is_planned": False, "dense_s": 0.4, "expected_s": 0.4}
CASES = {
    "a plan as fast as ever": ({**PLANNED, "step_s": 0.11}, Move.STAY),
    "a plan's first steps": ({**PLANNED, "step_s": 0.1, "expected_s": None}, Move.EXPECT),
    "a plan that seems not to gain": ({**PLANNED, "step_s": 0.4, "expected_s": None}, Move.PROBE),
    "a plan that does not gain": (
        {**PLANNED, "step_s": 0.4, "expected_s": None, "slowness": 1.0},
        Move.DENSE,
    ),
    "a plan whose link became slower": (
        {**PLANNED, "step_s": 2.0, "expected_s": None, "slowness": 20.0},
        Move.PLAN,
    ),
    "a plan with a rival": (
        {**PLANNED, "step_s": 0.1, "expected_s": None, "rival_s": 0.12},
        Move.TRY_RIVAL,
    ),
    "a plan that does not gain, and a rival that may": (
        {**PLANNED, "step_s": 0.5, "expected_s": None, "rival_s": 0.3},
        Move.TRY_RIVAL,
    ),
    "a rival that is out of reach": (
        {**PLANNED, "step_s": 0.1, "expected_s": None, "rival_s": 0.13},
        Move.EXPECT,
    ),
    "a rival that would not gain over dense": (
        {**PLANNED, "step_s": 0.39, "expected_s": None, "rival_s": 0.39},
        Move.EXPECT,
    ),
    "a plan that seems not to gain, on the same link": (
        {**PLANNED, "step_s": 0.4, "expected_s": None, "slowness": 1.0, "planned_s": None},
        Move.TRY_DENSE,
    ),
    "a plan that gains little": (
        {**PLANNED, "step_s": 0.36, "expected_s": None, "planned_s": None},
        Move.TRY_DENSE,
    ),
    "a plan that gains little, and did so beside dense steps": (
        {**PLANNED, "step_s": 0.36, "expected_s": None},
        Move.EXPECT,
    ),
    "a rival that is as fast": (
        {**PLANNED, "step_s": 0.1, "expected_s": None, "best_s": 0.1},
        Move.EXPECT,
    ),
    "a rival that is slower": (
        {**PLANNED, "step_s": 0.11, "expected_s": None, "best_s": 0.1},
        Move.BACK,
    ),
    "a rival that is slower, with another that may be as fast as the best": (
        {**PLANNED, "step_s": 0.2, "expected_s": None, "rival_s": 0.12, "best_s": 0.1},
        Move.TRY_RIVAL,
    ),
    "a rival that is slower, with another out of reach of the best": (
        {**PLANNED, "step_s": 0.2, "expected_s": None, "rival_s": 0.13, "best_s": 0.1},
        Move.BACK,
    ),
    "a rival slower than dense, and a plan that is not": (
        {**PLANNED, "step_s": 0.5, "expected_s": None, "best_s": 0.1},
        Move.BACK,
    ),
    "a plan and a rival that do not gain": (
        {**PLANNED, "step_s": 0.5, "expected_s": None, "best_s": 0.6, "slowness": 1.0},
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
    "a trial that the plan wins": (
        {**PLANNED, "is_planned": False, "is_trial": True, "step_s": 0.4},
        Move.RETURN,
    ),
    "a trial that dense wins": (
        {**PLANNED, "is_planned": False, "is_trial": True, "step_s": 0.1, "slowness": 1.0},
        Move.DENSE,
    ),
    "a trial that is off": (
        {**PLANNED, "is_planned": False, "is_trial": True, "step_s": 0.1},
        Move.PROBE,
    ),
    "a trial on another link": (
        {**PLANNED, "is_planned": False, "is_trial": True, "step_s": 0.1, "slowness": 0.2},
        Move.PLAN,
    ),
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
