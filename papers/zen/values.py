"""Reading rows back: claims and pictures are made from rows alone, measured now or long
ago.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..frame import Row


def number(row: Row, key: str) -> float:
    """A row's number."""
    value = row[key]
    assert isinstance(value, (int, float)), f"{key} of {row['name']} is no number"
    return float(value)


def listed(row: Row, key: str) -> Sequence[float]:
    """A row's list of numbers."""
    value = row[key]
    assert isinstance(value, (list, tuple)), f"{key} of {row['name']} is no list"
    return value


def by_number(row: Row, start: str) -> list[tuple[float, float]]:
    """(7, 0.5) for an entry "start_7" of 0.5, in the row's order."""
    return [
        (float(key.removeprefix(start)), number(row, key))
        for key in row
        if key.startswith(start) and key.removeprefix(start).isdigit()
    ]
