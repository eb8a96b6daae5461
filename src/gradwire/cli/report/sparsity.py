"""The density, overlap, densification and skewness of gradients, as one picture of four panels.

Source: ZEN (OSDI 2025), figures 2a, 2b, 3a and 3b.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...errors import InvalidSetting
from ...planning.data.sparsity import HEATMAP_PARTS, SparsityProfile, TensorSparsity
from .figure import FAINT, INK, SERIES, new_figure, quiet, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = len(SERIES)
"""The number of tensors that are drawn, the largest ones: one for each colour."""


def draw(sparsity: SparsityProfile, path: Path, *, title: str) -> Path:
    """Draws the largest sparse tensors and saves the picture as PNG.

    Extrapolated lines are dashed. Raises InvalidSetting if no tensor is sparse, or if matplotlib is
    missing.
    """
    if not sparsity.tensors:
        raise InvalidSetting(
            "there is nothing to draw: no gradient is sparse; profile a model with embeddings, or "
            "give a sparsifier"
        )
    by_size = sorted(sparsity.tensors, key=lambda t: -t.units.num_units * t.units.width)
    tensors = by_size[:MOST]
    figure = new_figure(11, 7.5)
    (overlaps, growth), (heat, skew) = figure.subplots(2, 2)
    _overlaps(overlaps, tensors)
    _growth(growth, tensors)
    _heat(heat, tensors)
    _skew(skew, tensors)
    names = [tensor.name for tensor in tensors]
    figure.legend(
        *growth.get_legend_handles_labels(),
        frameon=False,
        fontsize=9,
        ncols=len(names),
        loc="outside lower left",
    )
    return save(figure, path, title)


def _overlaps(axes: Axes, tensors: Sequence[TensorSparsity]) -> None:
    """Draws the distribution of the overlap ratios of pairs of gradients, smoothed."""
    x_P = np.linspace(0.0, 1.0, 401)
    for place, tensor in enumerate(tensors):
        pairs = np.array(tensor.units.overlaps)
        if not len(pairs):
            continue
        width = max(1.06 * pairs.std() * len(pairs) ** -0.2, 0.005)  # Silverman's rule
        kernels = np.exp(-0.5 * ((x_P[:, None] - pairs) / width) ** 2)
        axes.plot(x_P, kernels.mean(1) / (width * np.sqrt(2 * np.pi)), color=SERIES[place])
    _label(axes, "overlap ratio of two gradients", "probability density", "overlap")


def _growth(axes: Axes, tensors: Sequence[TensorSparsity]) -> None:
    for place, tensor in enumerate(tensors):
        points = [(1, 1.0), *((d.ranks, d.ratio) for d in tensor.units.densification)]
        known = 1 + sum(not d.extrapolated for d in tensor.units.densification)
        colour = SERIES[place]
        axes.plot(*zip(*points[:known], strict=True), color=colour, label=tensor.name)
        axes.plot(*zip(*points[known - 1 :], strict=True), color=colour, linestyle="--")
    _label(axes, "ranks (dashed: extrapolated)", "densification ratio", "density of the sum")
    _doubling(axes, tensors[0])


def _skew(axes: Axes, tensors: Sequence[TensorSparsity]) -> None:
    for place, tensor in enumerate(tensors):
        points = [(cut.parts, cut.ratio) for cut in tensor.units.skewness]
        axes.plot(*zip(*points, strict=True), color=SERIES[place])
    _label(axes, "even partitions", "skewness ratio", "largest density of a partition")
    _doubling(axes, tensors[0])


def _doubling(axes: Axes, tensor: TensorSparsity) -> None:
    marks = [cut.parts for cut in tensor.units.skewness]
    axes.set_xscale("log", base=2)
    axes.set_xticks(marks, [str(mark) for mark in marks])


def _heat(axes: Axes, tensors: Sequence[TensorSparsity]) -> None:
    shares = [tensor.units.shares for tensor in tensors]
    axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    for row, own in enumerate(shares):
        for column, share in enumerate(own):
            colour = "white" if share > 0.6 else INK
            text = f"{100 * share:.0f} %"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    axes.set_yticks(range(len(tensors)), [tensor.name for tensor in tensors])
    axes.set_xticks(range(HEATMAP_PARTS), [str(part + 1) for part in range(HEATMAP_PARTS)])
    _label(axes, "partition", "", "share of the non-zero units")
    axes.grid(visible=False)


def _label(axes: Axes, x_label: str, y_label: str, title: str) -> None:
    axes.set_xlabel(x_label, fontsize=9, color=INK)
    axes.set_ylabel(y_label, fontsize=9, color=INK)
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.grid(color=FAINT, linewidth=0.6)
    quiet(axes)
