"""Traces as Gantt charts: a panel for each trace, a row for each lane of a rank, one
time axis.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from gradwire.contract.trace.span import Span, StepDensity, Trace
from gradwire.contract.units import format_seconds
from gradwire.errors import InvalidSetting

from .chrome import slots
from .figure import FAINT, INK, SERIES, legend, new_figure, quiet, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "forward": "#a9c4e6",
    "backward": "#3d6fb6",
    "encode": "#d9822b",
    "merge": "#b5485d",
    "decode": "#e8b84f",
    "transfer": "#4b9a5f",
    "wait": "#d8dee4",
    "optimizer": "#7d62ad",
}
"""The colours of the usual kinds of work, which are the same in all pictures."""

_TRANSFERS = re.compile(
    r"send|recv|all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|broadcast|transfer",
    re.I,
)
ROW_IN = 0.2
PANEL_IN = 0.5
ROW_FILL = 0.78


def kind(span: Span) -> str:
    """The kind of work a span is drawn as: a key of ``COLOURS`` if one fits, else its
    first word.

    >>> kind(Span(0, "communication", "AllGather 3", 0, 1))
    'transfer'
    >>> kind(Span(0, "compute", "clip", 0, 1))
    'clip'
    """
    if span.lane in ("forward", "backward", "wait"):
        return span.lane
    word = re.split(r"[^A-Za-z_]+", span.name.strip(), maxsplit=1)[0].lower()
    if word in COLOURS:
        return word
    if span.lane == "communication" or _TRANSFERS.match(word):
        return "transfer"
    return word or span.lane


def draw(traces: Mapping[str, Trace], path: Path, *, title: str) -> Path:
    """Draws one panel for each named trace and saves the picture as PNG.

    Each trace starts at its own first span; all panels share the time axis, so that
    lengths can be compared. Spans of one lane that overlap lie above each other within
    their row. Raises InvalidSetting if no trace has a span, or if matplotlib is
    missing.
    """
    drawn = {name: trace for name, trace in traces.items() if trace.spans}
    if not drawn:
        raise InvalidSetting(
            "a timeline needs at least one span, got none; trace a step first"
        )
    rows = {name: len(trace.lanes()) for name, trace in drawn.items()}
    height_in = sum(ROW_IN * num + PANEL_IN for num in rows.values()) + 1.1
    figure = new_figure(height_in)
    from matplotlib.patches import Patch

    panels = figure.subplots(
        len(drawn),
        1,
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": [rows[name] + 1 for name in drawn]},
    )[:, 0]
    colours = _colours(drawn.values())
    longest_s = max(trace.iteration_s for trace in drawn.values())
    unit = "ms"
    factor = 1e3
    if longest_s >= 2:
        unit = "s"
        factor = 1.0
    for axes, (name, trace) in zip(panels, drawn.items(), strict=True):
        _panel(axes, trace, colours, factor)
        title_of_panel = f"{name}: {format_seconds(trace.iteration_s)}"
        densities = density_summary(trace.densities)
        if densities:
            title_of_panel += f", {densities}"
        axes.set_title(title_of_panel, loc="left", fontsize=9, color=INK)
    panels[-1].set_xlim(0, longest_s * factor * 1.01 or 1.0)
    panels[-1].set_xlabel(f"time ({unit})", fontsize=9, color=INK)
    patches = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    legend(figure, patches, columns=4)
    return save(figure, path, title)


def density_summary(densities: Sequence[StepDensity]) -> str:
    """The densities over all steps given, in words; "" where nothing was selected.

    >>> density_summary([StepDensity(0, 7, 0.5, 800, 10_000, 100.0, 100, 380)])
    'density 0.038 (0.01 asked)'
    """
    if not densities:
        return ""
    actual = f"density {fmean(density.actual for density in densities):.3g}"
    asked = [d.asked_density for d in densities if d.asked_density is not None]
    if not asked:
        return actual
    return f"{actual} ({fmean(asked):.3g} asked)"


def _colours(traces: Iterable[Trace]) -> dict[str, str]:
    """A colour for every kind present: the fixed ones first, then the others as they
    come.
    """
    present = dict.fromkeys(kind(span) for trace in traces for span in trace.spans)
    fixed = {name: colour for name, colour in COLOURS.items() if name in present}
    others = [name for name in present if name not in COLOURS]
    spare = [colour for colour in SERIES if colour not in fixed.values()]
    return fixed | {name: spare[i % len(spare)] for i, name in enumerate(others)}


def _panel(axes: Axes, trace: Trace, colours: Mapping[str, str], factor: float) -> None:
    zero_s = min(span.start_s for span in trace.spans)
    lanes = trace.lanes()
    one_rank = len({rank for rank, _ in lanes}) == 1
    for row, place in enumerate(lanes):
        spans = [span for span in trace.spans if (span.rank, span.lane) == place]
        levels = slots(spans)
        height = ROW_FILL / (max(levels) + 1)
        bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for span, level in zip(spans, levels, strict=True):
            start = (span.start_s - zero_s) * factor
            length = span.duration_s * factor
            of_kind = bars.setdefault((level, kind(span)), [])
            of_kind.append((start, length))
        for (level, what), stretches in bars.items():
            bottom = row - ROW_FILL / 2 + level * height
            axes.broken_barh(
                stretches,
                (bottom, height),
                facecolors=colours[what],
                edgecolors="white",
                linewidth=0.3,
            )
    axes.axvline(
        trace.iteration_s * factor, color=INK, linewidth=0.8, linestyle=(0, (2, 2))
    )
    axes.set_yticks(
        range(len(lanes)),
        [lane if one_rank else f"rank {rank}  {lane}" for rank, lane in lanes],
    )
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    quiet(axes)
