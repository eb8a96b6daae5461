"""The parts that all pictures share: a figure without a window system, colours, and
saving.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from gradwire.errors import NotInstalled

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#24292f"
FAINT = "#d8dee4"
SERIES = (
    "#3d6fb6",
    "#d9822b",
    "#4b9a5f",
    "#b5485d",
    "#7d62ad",
    "#2b93a0",
    "#8c6d46",
    "#5f6b7a",
)
"""Colours of series, in the order in which they are given to them. Readers with a
common colour blindness can tell them apart.
"""


WIDTH_IN = 4.8
"""The width of a picture. On a phone of 390 px its words are about 10 px high."""


def new_figure(height_in: float) -> Figure:
    """An empty figure that draws into memory, on any machine and in any thread."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise NotInstalled("a picture", "matplotlib", "report") from None
    figure = Figure(
        figsize=(WIDTH_IN, height_in), layout="constrained", facecolor="white"
    )
    FigureCanvasAgg(figure)
    return figure


def quiet(axes: Axes) -> None:
    """Removes the frame around the data."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(length=0, colors=INK, labelsize=9)
    axes.set_axisbelow(True)


def label(axes: Axes, x_label: str, y_label: str = "", title: str = "") -> None:
    """Names both axes and the panel, above a grid and without a frame."""
    axes.set_xlabel(x_label, fontsize=9, color=INK)
    axes.set_ylabel(y_label, fontsize=9, color=INK)
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.grid(color=FAINT, linewidth=0.6)
    quiet(axes)


def legend(figure: Figure, handles: Sequence[Artist], columns: int = 2) -> None:
    """Names what is drawn, once for all panels, below them."""
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        fontsize=9,
        handlelength=1.2,
        columnspacing=1.2,
    )


def save(figure: Figure, path: Path, title: str) -> Path:
    """Writes the figure with its title as PNG and returns the path."""
    if title:
        text = "\n".join(wrap(title, 52))
        figure.suptitle(
            text, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK
        )
    figure.savefig(
        path, dpi=200, format="png", metadata={"Title": title, "Software": "gradwire"}
    )
    return path
