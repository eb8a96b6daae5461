"""Figures of several runs as horizontal bars, with a panel for each figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gradwire.cli.report.table import Row, cell, heading
from gradwire.errors import InvalidSetting

from .figure import FAINT, INK, SERIES, label, new_figure, save


def draw(
    rows: Sequence[Row],
    path: Path,
    *,
    keys: Sequence[str],
    title: str,
    notes: Mapping[str, str] | None = None,
) -> Path:
    """Draws a panel for each of ``keys``, a bar for each row, and saves the picture as
    PNG.

    A row lacking a key, or with None there, gets no bar. ``notes`` are the panels'
    titles where the key read as words does not say enough, such as
    ``{"step_s": "median step (less is better)"}``.
    """
    if not rows or not keys:
        raise InvalidSetting(
            f"bars need rows and keys, got {len(rows)} rows and {len(keys)} "
            "keys; give one of each"
        )
    names = [str(row["name"]) for row in rows]
    figure = new_figure((0.22 * len(rows) + 0.4) * len(keys) + 0.5)
    panels = figure.subplots(len(keys), 1, squeeze=False)[:, 0]
    for axes, key in zip(panels, keys, strict=True):
        values = [_number(row.get(key)) for row in rows]
        colours = [SERIES[i % len(SERIES)] for i in range(len(rows))]
        axes.barh(range(len(rows)), values, color=colours, height=0.68)
        for place, (row, value) in enumerate(zip(rows, values, strict=True)):
            text = cell(key, row.get(key))
            axes.annotate(
                text,
                (value, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=INK,
            )
        label(axes, "", title=(notes or {}).get(key, heading(key)))
        axes.set_xlim(0, max([*values, 0.0]) * 1.3 or 1.0)
        axes.set_xticks([])
        axes.set_yticks(range(len(rows)), names)
        axes.axvline(0, color=FAINT, linewidth=1)
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(False)
        axes.invert_yaxis()
    return save(figure, path, title)


def _number(value: object) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    return 0.0
