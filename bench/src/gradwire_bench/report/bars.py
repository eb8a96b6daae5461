"""Figures of several runs as horizontal bars, with a panel for each figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gradwire.cli.report.table import Row, cell, heading
from gradwire.errors import InvalidSetting

from .figure import FAINT, INK, SERIES, new_figure, quiet, save


def draw(
    rows: Sequence[Row],
    path: Path,
    *,
    keys: Sequence[str],
    title: str,
    notes: Mapping[str, str] | None = None,
) -> Path:
    """Draws a panel for each of ``keys``, a bar for each row, and saves the picture as PNG.

    A row lacking a key, or with None there, gets no bar. ``notes`` are the panels' titles where the
    key read as words does not say enough, such as ``{"step_s": "median step (less is better)"}``.
    """
    if not rows or not keys:
        raise InvalidSetting(
            f"bars need rows and keys, got {len(rows)} rows and {len(keys)} keys; give one of each"
        )
    names = [str(row["name"]) for row in rows]
    figure = new_figure(max(4.5, 3.7 * len(keys)), 0.36 * len(rows) + 1.2)
    panels = figure.subplots(1, len(keys), sharey=True, squeeze=False)[0]
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
        axes.set_title((notes or {}).get(key, heading(key)), loc="left", fontsize=10, color=INK)
        axes.set_xlim(0, max([*values, 0.0]) * 1.3 or 1.0)
        axes.set_xticks([])
        axes.set_yticks(range(len(rows)), names)
        axes.axvline(0, color=FAINT, linewidth=1)
        quiet(axes)
        axes.spines["bottom"].set_visible(False)
    panels[0].invert_yaxis()
    return save(figure, path, title)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
