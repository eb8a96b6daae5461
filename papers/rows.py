"""Rows of figures: their numbers and means, and the curves that they hold, which are
drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradwire_bench.report import curves

from .frame import Row

POINTS = "points"
"""The key of a row's curve: [step, value] pairs, in the JSON file and the picture
only.
"""
NUM_POINTS = 50


def thinned(values: Sequence[float], num_points: int = NUM_POINTS) -> list[list[float]]:
    """A curve of at most so many points: each window's last step and its mean.

    >>> thinned([1.0, 3.0, 5.0, 7.0], num_points=2)
    [[2, 2.0], [4, 6.0]]
    """
    width = -(-len(values) // num_points)
    windows = [
        (start, values[start : start + width]) for start in range(0, len(values), width)
    ]
    return [[start + len(window), mean(window)] for start, window in windows]


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean of one value or more."""
    return sum(values) / len(values)


def number(row: Row, key: str) -> float:
    """A row's figure."""
    value = row[key]
    assert isinstance(value, (int, float)), f"{key} is no number"
    return float(value)


def draw(
    rows: Sequence[Row], path: Path, *, title: str, x_label: str, y_label: str
) -> Path:
    """A panel for each application, a line for each of its rows that has points."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        if POINTS in row:
            metric = f", {row['metric']}" if "metric" in row else ""
            panel = panels.setdefault(f"{row['application']}{metric}", {})
            points = row[POINTS]
            assert isinstance(points, (list, tuple))
            panel[str(row["name"])] = [(float(x), float(y)) for x, y in points]
    return curves.draw_panels(
        panels, path, title=title, x_label=x_label, y_label=y_label
    )
