"""Shares of a whole as a heat map: a row for each name, a column for each part,
numbered cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.errors import InvalidSetting
from gradwire_bench.report.figure import INK, label, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_NUMBERED = 16
"""The most columns with which a cell has room for its number."""


def draw(
    shares: Mapping[str, Sequence[float]],
    path: Path,
    *,
    title: str,
    x_label: str,
    columns: Sequence[str] = (),
) -> Path:
    """Draws a row of cells for each name, numbered in per cent, and saves the picture
    as PNG.

    ``shares`` are fractions in [0, 1]: the darker a cell, the larger its share. Rows
    need not be equally long. ``columns`` names the parts; without it they are counted
    from 1. Raises InvalidSetting if there is no cell, or if matplotlib is missing.
    """
    widest = max(map(len, shares.values()), default=0)
    if not widest:
        raise InvalidSetting(
            "a heat map needs at least one cell, got none; give a row of shares"
        )
    figure = new_figure(0.4 * len(shares) + 1.2)
    axes = figure.subplots()
    fill(axes, shares)
    names = list(columns) or [str(part + 1) for part in range(widest)]
    axes.set_xticks(range(widest), names)
    label(axes, x_label)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    return save(figure, path, title)


def fill(axes: Axes, shares: Mapping[str, Sequence[float]]) -> None:
    """Fills a panel with a row of cells for each name, and numbers the cells if they
    have room.
    """
    widest = max(map(len, shares.values()))
    cells = [[*row, *[float("nan")] * (widest - len(row))] for row in shares.values()]
    axes.imshow(cells, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    if widest <= _MOST_NUMBERED:
        for y, row in enumerate(shares.values()):
            for x, share in enumerate(row):
                colour = "white" if share > 0.6 else INK
                text = f"{100 * share:.0f}"
                axes.text(
                    x, y, text, ha="center", va="center", fontsize=8, color=colour
                )
    axes.set_yticks(range(len(shares)), list(shares))
