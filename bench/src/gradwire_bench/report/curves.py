"""Lines over time, steps or ranks: loss curves, message seconds over size, speedup over
ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire.errors import InvalidSetting

from .figure import SERIES, label, legend, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

Series = Mapping[str, Sequence[tuple[float, float]]]
"""Points (x, y) by the name of their line."""


def draw_panels(
    panels: Mapping[str, Series],
    path: Path,
    *,
    title: str,
    x_label: str,
    y_label: str,
    doubling: bool = False,
) -> Path:
    """Draws the lines of each panel, named by its key, below each other, each on its
    own axes.

    A name has one colour in all panels, and stands in one legend. With ``doubling``
    equal steps on the x axis double, and each x that has a point is marked. Raises
    InvalidSetting if no series has a point, or if matplotlib is missing.
    """
    drawn = {
        panel: {name: list(points) for name, points in series.items() if len(points)}
        for panel, series in panels.items()
    }
    if not any(drawn.values()):
        raise InvalidSetting(
            "curves need at least one point, got none; give a series with points"
        )
    figure = new_figure(2.6 * len(drawn) + 0.8)
    rows = figure.subplots(len(drawn), 1, squeeze=False)[:, 0]
    lines: dict[str, Line2D] = {}
    colours = of_colours(name for series in drawn.values() for name in series)
    for axes, (panel, series) in zip(rows, drawn.items(), strict=True):
        for name, points in series.items():
            lines[name] = line(axes, points, colours[name], label=name)
        label(axes, x_label, y_label, panel)
        if doubling:
            axes.set_xscale("log", base=2)
            marks = sorted({x for points in series.values() for x, _ in points})
            axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
    legend(figure, list(lines.values()))
    return save(figure, path, title)


def of_colours(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """A colour and a dash for each name, in the order of the names."""
    dashes = ("-", "--", ":")
    return {
        name: (SERIES[place % len(SERIES)], dashes[place // len(SERIES) % len(dashes)])
        for place, name in enumerate(dict.fromkeys(names))
    }


def line(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    colour: tuple[str, str],
    **settings: Any,
) -> Line2D:
    """A line through points; a single point gets a mark."""
    settings = {
        "linewidth": 1.8,
        "marker": "o" if len(points) == 1 else None,
        **settings,
    }
    (drawn,) = axes.plot(
        *zip(*points, strict=True), color=colour[0], ls=colour[1], **settings
    )
    return drawn
