"""The parts of a reproduction: figures, each with rows of ours and the paper's own
statements.

A paper's values are facts with their place in it. Only numbers that stand in the text
or a table are given; nothing is read off a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TypeVar

from gradwire.cli.report.table import Row as Row
from gradwire_bench.testbed.ranks import Report as Report

T = TypeVar("T")
QUARTER = 0.25
"""How far a result may lie from a printed effect, as a share of that effect, and agree.

The papers' effects come from one cluster each, and repeated runs there differ by a few
per cent. A quarter leaves room for other hardware. It keeps three quarters of the
effect: a result without the effect, or with the opposite sign, never agrees, however
small the printed effect is.
"""


MEASURED = "measured"
"""A run on this machine: its seconds, bytes, counts or losses."""
SIMULATED = "simulated"
"""The virtual clock or a formula of seconds, with stated costs."""
BOTH = "measured, simulated"
BY_CONSTRUCTION = "by construction"
"""A definition that the code takes over, so that no run could show anything else."""
WAYS = (MEASURED, SIMULATED, BOTH, BY_CONSTRUCTION)


@dataclass(frozen=True)
class Claim:
    """A statement of the paper beside the result here."""

    says: str
    """The statement, in the paper's numbers."""
    place: str
    """The place of the statement in the paper: "table 4", "section 6.7"."""
    ours: str
    agrees: bool | None
    """Whether the result agrees; None where like is not compared with like.

    A verdict that could not be False for any measurement is None.
    """
    why: str = ""
    """The reason why ours differs, if it does, or why ``agrees`` is None."""
    agrees_if: str = ""
    """The results that agree, where the statement is a number; else the statement says
    it.
    """

    def __post_init__(self) -> None:
        """Refuses a verdict that is not said without a reason."""
        if self.agrees is None and not (self.why or self.ours.startswith("not ")):
            raise ValueError(f"{self.place}: say why nothing is said of {self.says!r}")


def effect(
    says: str,
    place: str,
    in_words: str,
    found: float,
    stated: float,
    why: str,
    points: float = inf,
) -> Claim:
    """A printed effect beside ours, both as shares: 0.089 is a gain of 8.9 %.

    Ours agrees within a quarter of the printed effect, and within ``points`` (0.1 is
    ten percentage points) where that is less. ``in_words`` is ours in words, and
    ``why`` is for where it disagrees.
    """
    slack = min(points, QUARTER * abs(stated))
    agrees = abs(found - stated) <= slack + 1e-9
    span = f"{100 * (stated - slack):.1f} to {100 * (stated + slack):.1f} %"
    return Claim(says, place, in_words, agrees, "" if agrees else why, span)


@dataclass(frozen=True)
class Findings:
    """The results of measuring a figure."""

    rows: tuple[Row, ...]
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    complete: bool = True
    """False where a part could not be measured here; next time the figure is measured
    again.
    """


@dataclass(frozen=True)
class Ask:
    """The conditions that a figure is measured under.

    ``earlier`` holds findings of figures measured before it.
    """

    quick: bool
    report: Report
    earlier: Mapping[str, Findings]
    folder: Path | None = None
    """The folder in which figures may keep data that the paper's other figures use too,
    or None.
    """

    def each(self, items: Sequence[T]) -> Sequence[tuple[float, T]]:
        """Each item with the fraction that is done before it, for reports."""
        return [(place / len(items), item) for place, item in enumerate(items)]


@dataclass(frozen=True)
class Figure:
    """One figure or table of a paper."""

    name: str
    """The name by which it is asked for, such as "figure18"."""
    title: str
    measure: Callable[[Ask], Findings]
    draw: Callable[[Sequence[Row], Path], Path] | None = None
    """Draws the rows and returns the picture's path."""
    unprinted: frozenset[str] = frozenset()
    """Keys of rows that are in the files only, so that the printed table fits a
    terminal.
    """


@dataclass(frozen=True)
class Item:
    """A table or figure that the paper prints, with the figures here that show it, or
    why not.
    """

    place: str
    """Its name in the paper: "figure 7", "table 4"."""
    shows: str
    figures: tuple[str, ...] = ()
    """The names of the ``Figure``s that show it; empty where it is not reproduced."""
    why: str = ""
    """The reason why it, or a part of it, is not reproduced."""
    how: str = ""
    """One of ``WAYS``; empty where it is not reproduced."""


@dataclass(frozen=True)
class Reproduction:
    """A paper's reproduction: the assumptions of all its figures, and these in
    measuring order.
    """

    paper: str
    assumptions: tuple[str, ...]
    contents: tuple[Item, ...]
    """Every table and figure of the paper, and the measurements here beyond them."""
    figures: tuple[Figure, ...]
