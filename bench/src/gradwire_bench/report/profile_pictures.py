"""Pictures of a profile: its layers with the lines fitted to a cluster, and sparse gradients.

Source of the second: ZEN (OSDI 2025), figures 2a, 2b, 3a and 3b: density, overlap, densification
and skewness, a panel each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gradwire.errors import InvalidSetting
from gradwire.planning.data.cluster import PRIMITIVES, Cluster
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.profile import Layer
from gradwire.planning.data.sparsity import HEATMAP_PARTS, SparsityProfile, TensorSparsity

from . import heat
from .figure import SERIES, label, legend, new_figure, save
from .timeline import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_NAMES = 40
"""The most layers that are named on the axis; more would not be legible."""


def draw(layers: Sequence[Layer], cluster: Cluster | None, path: Path, *, title: str) -> Path:
    """Draws layers, collectives and codecs, a panel for each that there is, and saves a PNG.

    Points are measured medians, and lines are fitted to them. Raises InvalidSetting if there is
    nothing to draw, or if matplotlib is missing.
    """
    panels: list[Callable[[Axes], None]] = []
    if layers:
        panels.append(lambda axes: _layers(axes, layers))
    if cluster is not None and cluster.collectives:
        lines = {str(verb): line for verb, line in cluster.collectives.items()}
        panels.append(lambda axes: _lines(axes, lines, "bytes", "a message in the runtime"))
    if cluster is not None and cluster.codecs:
        fits = {
            f"{name} {primitive}": getattr(fit, primitive)
            for name, fit in cluster.codecs.items()
            for primitive in PRIMITIVES
            if not getattr(fit, primitive).is_nothing
        }
        panels.append(lambda axes: _lines(axes, fits, "elements", "a codec's primitive"))
    if not panels:
        raise InvalidSetting("there is nothing to draw: give layers, or a measured cluster")
    figure = new_figure(4.2 * len(panels))
    for axes, fill in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
    ):
        fill(axes)
        axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0.0, -0.2))
    return save(figure, path, title)


def _layers(axes: Axes, layers: Sequence[Layer]) -> None:
    places = range(len(layers))
    forward_ms = [1e3 * layer.forward_s for layer in layers]
    backward_ms = [1e3 * layer.backward_s for layer in layers]
    axes.bar(places, forward_ms, color=COLOURS["forward"], label="forward")
    axes.bar(places, backward_ms, bottom=forward_ms, color=COLOURS["backward"], label="backward")
    label(axes, "", "ms", "layers, in forward order")
    if len(layers) <= MAX_NAMES:
        axes.set_xticks(places, [layer.name for layer in layers], rotation=60, ha="right")


def _lines(axes: Axes, lines: Mapping[str, LineFit], unit: str, what: str) -> None:
    for number, (name, line) in enumerate(lines.items()):
        colour = SERIES[number % len(SERIES)]
        sizes = [size for size, _ in line.samples]
        axes.plot(sizes, [seconds for _, seconds in line.samples], "o", color=colour, markersize=4)
        style = "-" if number < len(SERIES) else "--"
        axes.plot(sizes, [line.seconds(size) for size in sizes], style, color=colour, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    label(axes, unit, "s", f"{what}: medians, and the line fitted")


# ---- the sparsity of gradients -----------------------------------------------------------------

MOST = len(SERIES)
"""The number of tensors that are drawn, the largest ones: one for each colour."""


def draw_sparsity(sparsity: SparsityProfile, path: Path, *, title: str) -> Path:
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
    figure = new_figure(11.0)
    overlaps, growth, shares, skew = figure.subplots(4, 1)
    _overlaps(overlaps, tensors)
    _growth(growth, tensors)
    _heat(shares, tensors)
    _skew(skew, tensors)
    legend(figure, growth.get_legend_handles_labels()[0])
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
    label(axes, "overlap ratio of two gradients", "probability density", "overlap")


def _growth(axes: Axes, tensors: Sequence[TensorSparsity]) -> None:
    for place, tensor in enumerate(tensors):
        points = [(1, 1.0), *((d.ranks, d.ratio) for d in tensor.units.densification)]
        known = 1 + sum(not d.extrapolated for d in tensor.units.densification)
        colour = SERIES[place]
        axes.plot(*zip(*points[:known], strict=True), color=colour, label=tensor.name)
        axes.plot(*zip(*points[known - 1 :], strict=True), color=colour, linestyle="--")
    label(axes, "ranks (dashed: extrapolated)", "densification ratio", "density of the sum")
    _doubling(axes, tensors[0])


def _skew(axes: Axes, tensors: Sequence[TensorSparsity]) -> None:
    for place, tensor in enumerate(tensors):
        points = [(cut.parts, cut.ratio) for cut in tensor.units.skewness]
        axes.plot(*zip(*points, strict=True), color=SERIES[place])
    label(axes, "even partitions", "skewness ratio", "largest density of a partition")
    _doubling(axes, tensors[0])


def _doubling(axes: Axes, tensor: TensorSparsity) -> None:
    marks = [cut.parts for cut in tensor.units.skewness]
    axes.set_xscale("log", base=2)
    axes.set_xticks(marks, [str(mark) for mark in marks])


def _heat(axes: Axes, tensors: Sequence[TensorSparsity]) -> None:
    heat.fill(axes, {tensor.name: tensor.units.shares for tensor in tensors})
    axes.set_xticks(range(HEATMAP_PARTS), [str(part + 1) for part in range(HEATMAP_PARTS)])
    label(axes, "partition", "", "share of the non-zero units, in %")
    axes.grid(visible=False)
