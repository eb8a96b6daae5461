"""Lines over time, steps or ranks: loss curves, message seconds over size, speedup over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.errors import InvalidSetting

from .figure import FAINT, INK, SERIES, new_figure, quiet, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = Mapping[str, Sequence[tuple[float, float]]]
"""Points (x, y) by the name of their line."""


def draw(series: Series, path: Path, *, title: str, x_label: str, y_label: str) -> Path:
    """Draws a line for each name through its (x, y) points and saves the picture as PNG.

    The legend's order is that of the lines' right ends, so it reads like the picture. Raises
    InvalidSetting if no series has a point, or if matplotlib is missing.
    """
    return draw_panels({"": series}, path, title=title, x_label=x_label, y_label=y_label)


def draw_panels(
    panels: Mapping[str, Series],
    path: Path,
    *,
    title: str,
    x_label: str,
    y_label: str,
    doubling: bool = False,
) -> Path:
    """Draws the lines of each panel, named by its key, beside each other, each on its own axes.

    A name has one colour in all panels. With ``doubling`` equal steps on the x axis double, and
    each x that has a point is marked. Raises InvalidSetting as ``draw`` does.
    """
    drawn = {
        panel: {name: list(points) for name, points in series.items() if len(points)}
        for panel, series in panels.items()
    }
    if not any(drawn.values()):
        raise InvalidSetting("curves need at least one point, got none; give a series with points")
    names = list(dict.fromkeys(name for series in drawn.values() for name in series))
    figure = new_figure(7.5 if len(drawn) == 1 else 5.5 * len(drawn), 4.2)
    for axes, (panel, series) in zip(
        figure.subplots(1, len(drawn), squeeze=False)[0], drawn.items(), strict=True
    ):
        _lines(axes, series, names)
        axes.set_title(panel, loc="left", fontsize=10, color=INK)
        axes.set_xlabel(x_label, fontsize=9, color=INK)
        axes.set_ylabel(y_label, fontsize=9, color=INK)
        if doubling:
            axes.set_xscale("log", base=2)
            marks = sorted({x for points in series.values() for x, _ in points})
            axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
    return save(figure, path, title)


def _lines(axes: Axes, series: Series, names: Sequence[str]) -> None:
    for name, points in series.items():
        colour = names.index(name)
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=name,
            color=SERIES[colour % len(SERIES)],
            linestyle="-" if colour < len(SERIES) else "--",
            linewidth=1.8,
            marker="o" if len(points) == 1 else None,
        )
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: -series[labels[i]][-1][1])
    axes.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        frameon=False,
        fontsize=9,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )
    axes.grid(color=FAINT, linewidth=0.6)
    quiet(axes)
