"""What a reproduction consists of: figures, each with rows of ours and the paper's own statements.

A paper's values are facts with their place in it. Only numbers that stand in the text or a table
are given; nothing is read off a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Row = dict[str, object]
"""A ``name`` and plain values with their unit in the key, as ``gradwire.report.table`` shows."""
Report = Callable[[float, str], None]
"""Tells how far a figure is: (fraction done in [0, 1], what is going on)."""
T = TypeVar("T")


@dataclass(frozen=True)
class Claim:
    """A statement of the paper beside what came out here."""

    says: str
    """The statement, in the paper's numbers."""
    place: str
    """Where it stands: "table 4", "section 6.7"."""
    ours: str
    agrees: bool | None
    """None where nothing was measured that it could be held against, or nothing that is alike."""
    why: str = ""
    """Why ours differs, if it does, or why neither is said."""


@dataclass(frozen=True)
class Findings:
    """What measuring a figure gave."""

    rows: tuple[Row, ...]
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    complete: bool = True
    """False where a part could not be measured here; next time the figure is measured again."""


@dataclass(frozen=True)
class Ask:
    """What a figure is measured under. ``earlier`` holds findings of figures measured before it."""

    quick: bool
    report: Report
    earlier: Mapping[str, Findings]
    folder: Path | None = None
    """Where figures may keep what others of the paper use as well; None: nowhere."""

    def each(self, items: Sequence[T]) -> Sequence[tuple[float, T]]:
        """(fraction done before it, item), for reports."""
        return [(place / len(items), item) for place, item in enumerate(items)]


@dataclass(frozen=True)
class Figure:
    """One figure or table of a paper."""

    name: str
    """What it is asked for by: "figure18"."""
    title: str
    measure: Callable[[Ask], Findings]
    draw: Callable[[Sequence[Row], Path], Path] | None = None
    """Draws the rows and returns the picture's path."""
    unprinted: frozenset[str] = frozenset()
    """Keys of rows that are in the files only, so that the printed table fits a terminal."""


@dataclass(frozen=True)
class Item:
    """A table or figure that the paper prints, with the figures here that show it, or why not."""

    place: str
    """Its name in the paper: "figure 7", "table 4"."""
    shows: str
    figures: tuple[str, ...] = ()
    """Names of ``Figure``s; empty where it is not reproduced."""
    why: str = ""
    """Why it is not reproduced, or which part of it is not."""


@dataclass(frozen=True)
class Reproduction:
    """A paper: what all its figures assume, and the figures in the order they are measured."""

    paper: str
    assumptions: tuple[str, ...]
    contents: tuple[Item, ...]
    """Every table and figure of the paper, and what is measured here beyond them."""
    figures: tuple[Figure, ...]
