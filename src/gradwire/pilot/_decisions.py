"""Decisions of ``auto``: pure functions of figures that all ranks share.

A decision is one of these: go on, time a message, plan anew for another link, take a
few dense steps to compare, stay dense. A plan that gains less than steps vary is
compared with dense steps at once. Dense is a normal answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil, inf
from statistics import median
from typing import NamedTuple

from ..contract.units import format_seconds

WORTH = 0.97
"""A plan is taken if its steps are to take at most this share of a dense step."""
GAIN = 0.99
"""A plan is kept while its steps take at most this share of a dense step."""
SURE = 0.85
"""A plan whose steps take more than this share of a dense step is compared at once.

The dense steps before it were taken in another mood of the machine, which is as large
as such a gain.
"""
OFF = 1.25
"""The factor, up or down, on the seconds of a step from which on the pilot looks for a
cause.
"""
MOST_OFF = 2.0
"""The same where a machine's steps differ but its link stays as it is: see `wider`."""
HALF = 0.5
"""A link whose messages take this share of their time, or its inverse, is another."""
REACH = 1.25
"""A rival is tried if predicted to take at most this many times the steps' time.

Predictions leave most out of plans of many messages, and of lanes that share their
cores: steps by one plan may take longer than predicted, and steps by another plan not.
"""
PAUSE = 3.0
"""A step over this many times its neighbours' median held a pause of the caller's."""


class Move(Enum):
    """A pilot's next move, after some steps."""

    STAY = "stay"
    EXPECT = "expect"
    """Expects the present seconds of a step from now on."""
    WAIT = "wait"
    """Looks again at the next review: steps are off by little, maybe by chance."""
    PROBE = "probe"
    """Measures the link, and decides with that."""
    PLAN = "plan"
    """Measures links anew and plans anew."""
    DENSE = "dense"
    """Steps back to dense messages for good, which is until the link changes."""
    STRICTER = "stricter"
    """Plans anew with a stricter fidelity: means are too far from dense ones."""
    TRY_DENSE = "try dense"
    """Takes a few dense steps, to know what they take."""
    RETURN = "return"
    """Goes on with the plan after dense steps."""
    TRY_RIVAL = "try rival"
    """Takes the next rival for some steps."""
    BACK = "back"
    """Goes back to the fastest of the plans that were tried."""


class Decision(NamedTuple):
    """A move, and its reason in words; "" where there is nothing to say."""

    move: Move
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Review:
    """Figures that all ranks know after some steps.

    Seconds are the slowest rank's.
    """

    is_planned: bool
    """Whether gradients travel by a plan."""
    is_trial: bool = False
    """Whether these are a few dense steps, taken to compare."""
    step_s: float
    """The seconds that a step typically took since the last decision."""
    expected_s: float | None = None
    """Seconds of a step when this plan, or dense steps, began.

    None where these are the first.
    """
    dense_s: float
    """Seconds of a dense step when last measured, or predicted for a new link."""
    planned_s: float | None = None
    """Seconds of this plan's step when last compared with dense ones; None before."""
    rival_s: float | None = None
    """Predicted seconds of a step by the next rival; None where none is left."""
    best_s: float | None = None
    """Seconds of a step by the fastest plan that was tried before this one.

    None for the first.
    """
    slowness: float | None = None
    """The seconds of a message over those when the link was measured.

    None where not probed.
    """
    off: float = OFF
    """Times longer, or shorter, that steps must take to be looked into."""
    was_off: bool = False
    """Whether steps were off at the review before too, and that one waited."""
    is_trial_due: bool = False
    """Whether it is time to compare with dense steps."""
    error: float | None = None
    """How far means are from dense ones, relative to these.

    None where none were compared.
    """
    allowed: float = inf
    """The most that ``error`` may be."""


def typical_s(steps_s: Sequence[float]) -> float:
    """Median seconds of steps, but for steps in which the caller did something else.

    A validation or a checkpoint between two steps says nothing of the plan.

    >>> typical_s([1.0, 1.5, 1.0, 1.5, 40.0, 40.0])
    1.25
    """
    most_s = PAUSE * median(steps_s)
    return median(step_s for step_s in steps_s if step_s <= most_s)


def is_worth(predicted_s: float, dense_s: float) -> bool:
    """Whether to try a plan, by a step's predicted and measured dense seconds."""
    return predicted_s <= WORTH * dense_s


def wider(off: float) -> float:
    """The factor that steps must be off by after a probe that found the same link.

    >>> wider(OFF), wider(wider(OFF)), wider(wider(wider(OFF)))
    (1.5, 2.0, 2.0)
    """
    return min(MOST_OFF, 1 + 2 * (off - 1))


def narrower(off: float) -> float:
    """The factor that steps must be off by after a review that found them as expected.

    >>> narrower(2.0), narrower(OFF)
    (1.9, 1.25)
    """
    return max(OFF, 1 + 0.9 * (off - 1))


def decide(review: Review) -> Decision:
    """The next move.

    >>> decide(Review(is_planned=True, step_s=0.1, dense_s=0.4)).move
    <Move.EXPECT: 'expect'>
    """
    slowness = review.slowness
    step_s = review.step_s
    if slowness is not None and not HALF < slowness < 1 / HALF:
        return Decision(
            Move.PLAN,
            f"a message takes {slowness:.2g} times what it took when the link was "
            "measured: measured and planned anew",
        )
    if review.is_trial:
        is_off = not 1 / review.off < step_s / review.dense_s < review.off
        if is_off and slowness is None:
            return Decision(Move.PROBE)
        return _compared(step_s, review.planned_s or step_s)
    if review.is_planned and review.expected_s is None:
        decision = _first(review)
        if decision is not None:
            return decision
    if review.is_planned and review.error is not None and review.error > review.allowed:
        return Decision(
            Move.STRICTER,
            f"means are off those of dense training by {review.error:.2g} of "
            "their norm, and "
            f"{review.allowed:.2g} is allowed: planned anew by a stricter fidelity",
        )
    if review.expected_s is None:
        return Decision(Move.EXPECT)
    is_off = not 1 / review.off < step_s / review.expected_s < review.off
    if is_off and slowness is None:
        is_far = not 1 / MOST_OFF < step_s / review.expected_s < MOST_OFF
        return Decision(Move.PROBE if is_far or review.was_off else Move.WAIT)
    if review.is_planned and (is_off or review.is_trial_due):
        return Decision(Move.TRY_DENSE)
    return Decision(Move.EXPECT if is_off else Move.STAY)


def _first(review: Review) -> Decision | None:
    """The move that follows from the first steps by a plan.

    None if these are as they should be.
    """
    step_s = review.step_s
    dense_s = review.dense_s
    best_s = inf if review.best_s is None else review.best_s
    rival_s = inf if review.rival_s is None else review.rival_s
    if rival_s <= min(REACH * min(step_s, best_s), WORTH * dense_s):
        reason = (
            f"{format_seconds(step_s)} a step by the plan, {format_seconds(rival_s)} "
            "are"
        )
        return Decision(
            Move.TRY_RIVAL, f"{reason} predicted by another, which is tried"
        )
    if best_s < GAIN * step_s:
        reason = (
            f"{format_seconds(step_s)} a step by this plan, {format_seconds(best_s)}"
        )
        return Decision(Move.BACK, f"{reason} by one before it, which is taken again")
    unsure = review.planned_s is None and step_s > SURE * dense_s
    if step_s > GAIN * dense_s:
        # For good, so not before it is known that the link is still the same.
        if review.slowness is None:
            return Decision(Move.PROBE)
        return Decision(Move.TRY_DENSE) if unsure else _compared(dense_s, step_s)
    return Decision(Move.TRY_DENSE) if unsure else None


LOOK_S = 0.5
"""Seconds of steps that suffice to judge by; a few short steps tell nothing."""


def num_to_judge(least: int, most: int, step_s: float) -> int:
    """The steps that are judged together: those of half a second, between two bounds.

    >>> num_to_judge(8, 24, 0.4), num_to_judge(8, 24, 0.04), num_to_judge(8, 24, 0.004)
    (8, 13, 24)
    """
    return max(least, min(most, ceil(LOOK_S / max(step_s, 1e-9))))


def _compared(dense_s: float, planned_s: float) -> Decision:
    reason = (
        f"{format_seconds(planned_s)} a step by the plan, {format_seconds(dense_s)} "
        "dense"
    )
    if planned_s > GAIN * dense_s:
        return Decision(Move.DENSE, f"{reason}: the plan does not gain, back to dense")
    return Decision(Move.RETURN, f"{reason}: the plan stays")
