"""The parts that all pictures share: a figure without a window system, colours, and saving."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.errors import NotInstalled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#24292f"
FAINT = "#d8dee4"
SERIES = ("#3d6fb6", "#d9822b", "#4b9a5f", "#b5485d", "#7d62ad", "#2b93a0", "#8c6d46", "#5f6b7a")
"""Colours of series, in the order in which they are given to them. Readers with a common colour
blindness can tell them apart."""


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty figure that draws into memory, on any machine and in any thread."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise NotInstalled("a picture", "matplotlib", "report") from None
    figure = Figure(figsize=(width_in, height_in), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def quiet(axes: Axes) -> None:
    """Removes the frame around the data."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(length=0, colors=INK, labelsize=9)
    axes.set_axisbelow(True)


def save(figure: Figure, path: Path, title: str) -> Path:
    """Writes the figure with its title as PNG and returns the path."""
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    figure.savefig(path, dpi=150, format="png", metadata={"Title": title, "Software": "gradwire"})
    return path
