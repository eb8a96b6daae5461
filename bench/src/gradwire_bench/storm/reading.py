"""The courses of a storm's ranks, read from the lines that their lives have written."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import inf, nan
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from gradwire.cli.report.table import Row

Line = list[Any]
"""Seconds since the storm began, a word, and values."""
Span = tuple[float, float]
Point = tuple[float, float, float]
"""Seconds, tokens in the model, and its loss."""


class Course(NamedTuple):
    """The course of one rank, in seconds since the storm began."""

    counted: list[Span]
    """Steps that ended in the model."""
    lost: list[Span]
    """Steps that did not."""
    dead: list[Span]
    counted_at_s: list[float]
    """When work reached the model."""
    rounds: list[Any]
    """The rounds that this rank was in."""
    num_failed: int
    """Attempts to be in a round that failed."""
    losses: list[Point]


def read_lines(file: Path, begin_s: float, seconds: float) -> list[Line]:
    """The lines of one rank, by the storm's clock, which begins at ``begin_s``.

    After the storm there is only word of its steps in the model.
    """
    lines = []
    for text in file.read_text(encoding="utf-8").splitlines():
        at_s, what, *values = json.loads(text)
        if what == "step":
            values[0] -= begin_s
        if at_s - begin_s <= seconds or what in ("step", "in", "out", "back"):
            lines.append([at_s - begin_s, what, *values])
    return lines


def course_of(lines: Iterable[Line], seconds: float) -> Course:
    """The course of a rank in a storm of so many seconds.

    The words are "life" and "end" of a process, "step" with its begin and number, "in"
    with a round, the numbers of the steps that it took in and whether there was work,
    "out" for a round without this rank, "back" to the begin of a round, and "loss" with
    tokens and loss.
    """
    by_word = defaultdict(list)
    rounds: dict[Any, list[int]] = {}
    num_taken_back = 0
    for at_s, what, *values in lines:
        by_word[what].append((at_s, *values))
        if what == "in":
            rounds[values[0]] = values[1]
        elif what == "back":
            num_taken_back += sum(number >= values[0] for number in rounds)
            rounds = {at: rounds[at] for at in rounds if at < values[0]}
    steps = {}
    for end_s, begin_s, number in by_word["step"]:
        if end_s > 0 and begin_s < seconds:
            steps[number] = (max(begin_s, 0.0), min(end_s, seconds))
    in_model = {number for numbers in rounds.values() for number in numbers}
    lives = [at_s for at_s, *_ in by_word["life"]]
    dead: dict[float, float] = {}
    for end_s, *_ in by_word["end"]:
        life_s = min((at_s for at_s in lives if at_s > end_s), default=seconds)
        # a process may end before its first word
        dead.setdefault(life_s, end_s)
    counted = []
    lost = []
    for number, step in steps.items():
        if number in in_model:
            counted.append(step)
        else:
            lost.append(step)
    return Course(
        counted=counted,
        lost=lost,
        dead=[(end_s, life_s) for life_s, end_s in dead.items()],
        counted_at_s=[at_s for at_s, *_, has_work in by_word["in"] if has_work],
        rounds=[*rounds],
        num_failed=len(by_word["out"]) + num_taken_back,
        losses=by_word["loss"],
    )


def row_of(name: str, courses: Sequence[Course], seconds: float) -> Row:
    """The figures of one way."""
    in_rounds = Counter(number for one in courses for number in one.rounds)
    num_failed = sum(one.num_failed for one in courses)
    back_s: list[float] = []
    trains_s: list[float] = []
    counts_s: list[float] = []
    for one in courses:
        begins_s = [begin_s for begin_s, _ in (*one.counted, *one.lost)]
        for end_s, life_s in one.dead:
            back_s.append(_next_s(one.counted_at_s, end_s))
            trains_s.append(_next_s(begins_s, life_s))
            counts_s.append(_next_s(one.counted_at_s, life_s))
    row: Row = {"name": name}
    for kind in ("counted", "lost", "dead"):
        spans = [span for one in courses for span in getattr(one, kind)]
        kind_s = sum(end_s - begin_s for begin_s, end_s in spans)
        row[f"fraction_{kind}"] = kind_s / (len(courses) * seconds)
    return {
        **row,
        "fraction_closed": in_rounds.total() / (in_rounds.total() + num_failed or 1),
        "fraction_in": fmean(in_rounds.values() or [0]) / len(courses),
        "back_s": median(back_s or [nan]),
        "trains_s": median(trains_s or [nan]),
        "counts_s": median(counts_s or [nan]),
    }


def _next_s(times_s: Iterable[float], since_s: float) -> float:
    """The seconds from a time to the next of others, or for ever."""
    return min((at_s for at_s in times_s if at_s > since_s), default=inf) - since_s


def losses_of(courses: Sequence[Course]) -> list[Point]:
    """The points of all ranks, in order of time; one of NaN if there is none."""
    points = sorted(point for one in courses for point in one.losses)
    return points or [(0.0, 0.0, nan)]


def loss_at(tokens: float, points: Sequence[Point]) -> float:
    """The loss where the model had seen so many tokens, between two points.

    >>> loss_at(150, [(0, 0, 5.0), (1, 100, 4.0), (2, 200, 3.0)])
    3.5
    """
    by_tokens = sorted((at, loss) for _, at, loss in points)
    low, low_loss = max(point for point in by_tokens if point[0] <= tokens)
    later = [point for point in by_tokens if point[0] > tokens]
    high, high_loss = min(later, default=(tokens, low_loss))
    share = (tokens - low) / (high - low or 1)
    return low_loss + share * (high_loss - low_loss)
