"""The picture of a profile: its layers, and the lines fitted to a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.errors import InvalidSetting
from gradwire.planning.data.cluster import PRIMITIVES, Cluster
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.profile import Layer

from .figure import SERIES, label, new_figure, save
from .timeline import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_NAMES = 40
"""The most layers that are named on the axis; more would not be legible."""


def draw(
    layers: Sequence[Layer], cluster: Cluster | None, path: Path, *, title: str
) -> Path:
    """Draws layers, collectives and codecs, a panel for each that there is, and saves a
    PNG.

    Points are measured medians, and lines are fitted to them. Raises InvalidSetting if
    there is nothing to draw, or if matplotlib is missing.
    """
    panels: list[Callable[[Axes], None]] = []
    if layers:
        panels.append(lambda axes: _layers(axes, layers))
    if cluster is not None and cluster.collectives:
        lines = {str(verb): line for verb, line in cluster.collectives.items()}
        panels.append(
            lambda axes: _lines(axes, lines, "bytes", "a message in the runtime")
        )
    if cluster is not None and cluster.codecs:
        fits = {
            f"{name} {primitive}": getattr(fit, primitive)
            for name, fit in cluster.codecs.items()
            for primitive in PRIMITIVES
            if not getattr(fit, primitive).is_nothing
        }
        panels.append(
            lambda axes: _lines(axes, fits, "elements", "a codec's primitive")
        )
    if not panels:
        raise InvalidSetting(
            "there is nothing to draw: give layers, or a measured cluster"
        )
    figure = new_figure(4.2 * len(panels))
    for axes, fill in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
    ):
        fill(axes)
        axes.legend(
            frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0.0, -0.2)
        )
    return save(figure, path, title)


def _layers(axes: Axes, layers: Sequence[Layer]) -> None:
    places = range(len(layers))
    forward_ms = [1e3 * layer.forward_s for layer in layers]
    backward_ms = [1e3 * layer.backward_s for layer in layers]
    axes.bar(places, forward_ms, color=COLOURS["forward"], label="forward")
    axes.bar(
        places,
        backward_ms,
        bottom=forward_ms,
        color=COLOURS["backward"],
        label="backward",
    )
    label(axes, "", "ms", "layers, in forward order")
    if len(layers) <= MAX_NAMES:
        axes.set_xticks(
            places, [layer.name for layer in layers], rotation=60, ha="right"
        )


def _lines(axes: Axes, lines: Mapping[str, LineFit], unit: str, what: str) -> None:
    for number, (name, line) in enumerate(lines.items()):
        colour = SERIES[number % len(SERIES)]
        sizes = [size for size, _ in line.samples]
        axes.plot(
            sizes,
            [seconds for _, seconds in line.samples],
            "o",
            color=colour,
            markersize=4,
        )
        style = "-" if number < len(SERIES) else "--"
        axes.plot(
            sizes,
            [line.seconds(size) for size in sizes],
            style,
            color=colour,
            label=name,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    label(axes, unit, "s", f"{what}: medians, and the line fitted")
