"""Lines over time or steps: loss curves, and message seconds over size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import InvalidSetting
from ._figure import FAINT, INK, SERIES, new_figure, quiet, save


def draw(
    series: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    title: str,
    x_label: str,
    y_label: str,
) -> Path:
    """Draws one line a name through its (x, y) points and saves the picture as PNG.

    The legend's order is that of the lines' right ends, so it reads like the picture. Raises
    InvalidSetting if no series has a point, or if matplotlib is missing.
    """
    drawn = {name: list(points) for name, points in series.items() if len(points)}
    if not drawn:
        raise InvalidSetting("curves need at least one point, got none; give a series with points")
    figure = new_figure(7.5, 4.2)
    axes = figure.subplots()
    for i, (name, points) in enumerate(drawn.items()):
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=name,
            color=SERIES[i % len(SERIES)],
            linestyle="-" if i < len(SERIES) else "--",
            linewidth=1.8,
            marker="o" if len(points) == 1 else None,
        )
    handles, names = axes.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda i: -drawn[names[i]][-1][1])
    axes.legend(
        [handles[i] for i in order],
        [names[i] for i in order],
        frameon=False,
        fontsize=9,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )
    axes.set_xlabel(x_label, fontsize=9, color=INK)
    axes.set_ylabel(y_label, fontsize=9, color=INK)
    axes.grid(color=FAINT, linewidth=0.6)
    quiet(axes)
    return save(figure, path, title)
