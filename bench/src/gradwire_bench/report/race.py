"""Losses over seconds: who reaches a loss first.

A loss of one step is noisy, so lines are means of the last steps, with the single steps
faint behind them. Every method trains on the same batches, so a mean over steps delays
all alike.
"""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import fmean

from .curves import Series as Series
from .curves import line, of_colours
from .figure import FAINT, INK, label, legend, new_figure, save

LOSS = "training loss"
LEVELS = 8
"""The number of losses at which methods are compared."""


def smoothed(losses: Sequence[float], over: int) -> list[float]:
    """The mean of the last ``over`` losses at each step.

    >>> smoothed([4.0, 2.0, 0.0], 2)
    [4.0, 3.0, 1.0]
    """
    return [fmean(losses[max(0, at - over) : at]) for at in range(1, len(losses) + 1)]


def first_to(series: Series, goal: float) -> tuple[str, float]:
    """The method that first reaches ``goal``, and its seconds; one method at least
    reaches it.

    >>> first_to({"fast": [(1, 3.0), (2, 2.5)], "good": [(3, 1.0)]}, 2.0)
    ('good', 3)
    """
    there = {
        name: next((seconds for seconds, loss in points if loss <= goal), None)
        for name, points in series.items()
    }
    return min(
        ((name, at) for name, at in there.items() if at is not None),
        key=lambda it: it[1],
    )


def goal_of(points: Sequence[tuple[float, float]]) -> float:
    """The loss at or below which a method stays in the last quarter of its steps.

    All methods have the same number of steps. One that is a little above this method at
    every step never reaches its last loss, however fast its steps are, and still
    reaches this goal. The highest loss of the quarter leaves out the luck of a single
    batch.

    >>> losses = [5.0, 4.0, 3.1, 2.5, 2.6, 2.4, 2.3, 2.2]
    >>> goal_of([*enumerate(losses, start=1)])
    2.3
    """
    return max(loss for _, loss in points[-ceil(len(points) / 4) :])


def draw(
    series: Series, single: Series, path: Path, *, title: str, beside: str
) -> Path:
    """Draws losses over seconds, and below them over steps, and saves the picture as
    PNG.

    ``single`` has the losses of single steps, drawn faint. A star marks who first
    reaches the goal that the method ``beside`` sets.
    """
    figure = new_figure(6.6)
    over_s, over_steps = figure.subplots(2, 1)
    colours = of_colours(series)
    lines = []
    goal = goal_of(series[beside])
    for name, points in series.items():
        line(over_s, single[name], colours[name], linewidth=0.8, alpha=0.3)
        lines.append(line(over_s, points, colours[name], label=name))
        line(
            over_steps, [(at, y) for at, (_, y) in enumerate(points, 1)], colours[name]
        )
    name, seconds = first_to(series, goal)
    over_s.axhline(goal, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
    over_s.plot(
        [seconds],
        [goal],
        "*",
        color=colours[name][0],
        markersize=13,
        markeredgecolor=INK,
    )
    star = f"star: {name} is first at the\ngoal ({goal:.2f}), after {seconds:.1f} s"
    label(over_s, "seconds", LOSS, f"{star}; faint: single steps")
    label(over_steps, "steps", LOSS)
    legend(figure, lines)
    return save(figure, path, title)


def draw_firsts(series: Series, path: Path, *, title: str, beside: str) -> Path:
    """Draws who reaches each of some losses first, and when the method ``beside`` does.

    The losses lie evenly between the first one of ``beside`` and its goal. Saves a PNG.
    """
    figure = new_figure(3.6)
    axes = figure.subplots()
    start = series[beside][0][1]
    end = goal_of(series[beside])
    levels = [end + (start - end) * place / LEVELS for place in reversed(range(LEVELS))]
    colours = of_colours(series)
    longest_s = series[beside][-1][0]
    for row, goal in enumerate(levels):
        name, seconds = first_to(series, goal)
        _, beside_s = first_to({beside: series[beside]}, goal)
        axes.barh(row, beside_s, color=FAINT, height=0.84)
        axes.barh(row, seconds, color=colours[name][0], height=0.5)
        inside = seconds > longest_s / 2
        axes.annotate(
            f"{name}, {seconds:.1f} s",
            (seconds, row),
            xytext=(-4 if inside else 4, 0),
            textcoords="offset points",
            ha="right" if inside else "left",
            va="center",
            fontsize=9,
            color="white" if inside else INK,
        )
    axes.set_yticks(range(LEVELS), [f"{goal:.2f}" for goal in levels])
    axes.invert_yaxis()
    label(axes, f"seconds until the first method is there (grey: {beside})", LOSS)
    axes.grid(visible=False)
    return save(figure, path, title)
