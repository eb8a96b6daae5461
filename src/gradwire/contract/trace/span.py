"""Span and Trace: the one form that states how long each piece of work took.

Beside spans stands the density that a rank was asked for, took and got in each step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from ...errors import InvalidSetting, invalid
from ..bounds import MOST, check_number, check_whole
from ..files import read_text, write_text


@dataclass(frozen=True, slots=True)
class StepDensity:
    """The elements that one rank selected in one step, over messages that select.

    ``numel`` elements could be selected; ``asked`` of them were asked for (density
    times numel; None where a codec has no density). This rank ``selected`` so many, and
    ``arrived`` are in the mean: the union over ranks, which gradient build-up makes
    larger (DEFT, section 3.1). ``sent_bytes`` counts the bytes that the rank sent in
    the whole step, dense messages included; ``end_s`` is the end of the step, on the
    clock of the spans.

    >>> density = StepDensity(0, 7, 0.5, 800, 10_000, 100.0, selected=100, arrived=380)
    >>> density.actual
    0.038
    """

    rank: int
    step: int
    end_s: float
    sent_bytes: int
    numel: int
    asked: float | None
    selected: int
    arrived: int

    @property
    def asked_density(self) -> float | None:
        """The density that was set."""
        return None if self.asked is None else self.asked / self.numel

    @property
    def local(self) -> float:
        """The share of the elements that this rank selected."""
        return self.selected / self.numel

    @property
    def actual(self) -> float:
        """The density of the mean."""
        return self.arrived / self.numel


SCHEMA = 1
LANES = ("forward", "backward", "compute", "offload", "communication", "wait")


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work of one rank.

    Args:
        rank: The rank.
        lane: The lane it ran on; see ``LANES``.
        name: The work.
        start_s: Its start in seconds, on a clock whose zero all spans of one trace
            share.
        end_s: Its end in seconds.
        size_bytes: Bytes that it sent; 0 (the default) for a computation.
        step: The iteration, from 0; -1 (the default): none.
        message: The message that it belongs to; -1 (the default): none.

    >>> Span(0, "compute", "encode", 0.5, 0.75).duration_s
    0.25
    """

    rank: int
    lane: str
    name: str
    start_s: float
    end_s: float
    size_bytes: int = 0
    step: int = -1
    message: int = -1

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Trace:
    """Spans of one or more ranks, ordered by start, and densities of steps.

    Args:
        spans: The spans, in order; ``Trace.of`` sorts them. Default: none.
        densities: The densities, in order. Default: none.

    >>> encode = Span(0, "compute", "encode", 0.5, 0.75)
    >>> trace = Trace.of([encode, Span(0, "backward", "backward", 0.0, 0.5)])
    >>> trace.iteration_s, [span.lane for span in trace.spans]
    (0.75, ['backward', 'compute'])
    """

    spans: tuple[Span, ...] = ()
    densities: tuple[StepDensity, ...] = ()

    @classmethod
    def of(cls, spans: Iterable[Span], densities: Iterable[StepDensity] = ()) -> Trace:
        """A trace of spans and densities in any order."""
        return cls(
            tuple(sorted(spans, key=lambda s: (s.start_s, s.rank, s.end_s))),
            tuple(sorted(densities, key=lambda d: (d.step, d.rank))),
        )

    @classmethod
    def merged(cls, traces: Iterable[Trace]) -> Trace:
        """One trace of all spans and densities in several ranks' traces."""
        every = list(traces)
        return cls.of(
            (span for trace in every for span in trace.spans),
            (density for trace in every for density in trace.densities),
        )

    @property
    def iteration_s(self) -> float:
        """Seconds from the first start to the last end; 0 for an empty trace."""
        if not self.spans:
            return 0.0
        return max(s.end_s for s in self.spans) - min(s.start_s for s in self.spans)

    def lanes(self) -> list[tuple[int, str]]:
        """(rank, lane) pairs present, ranks ascending, lanes in their usual order."""
        order = {lane: i for i, lane in enumerate(LANES)}

        def place(present: tuple[int, str]) -> tuple[int, int, str]:
            rank, lane = present
            return rank, order.get(lane, len(order)), lane

        return sorted({(s.rank, s.lane) for s in self.spans}, key=place)

    def steps(self) -> list[int]:
        """Step numbers present, ascending."""
        return sorted({s.step for s in self.spans if s.step >= 0})

    def only(
        self, keep: Callable[[Span], bool] | None = None, *, step: int | None = None
    ) -> Trace:
        """A part of the trace.

        Args:
            keep: A function of a span; True keeps it. Default: all spans.
            step: The step whose spans and densities are kept. Default: all steps.

        Returns:
            The part, as a trace.
        """
        return Trace(
            tuple(
                s
                for s in self.spans
                if (step is None or s.step == step) and (keep is None or keep(s))
            ),
            tuple(d for d in self.densities if step is None or d.step == step),
        )

    def busy_s(self, lane: str, rank: int | None = None) -> float:
        """Seconds in which at least one span of a lane was open; overlaps count once.

        Args:
            lane: The lane; see ``LANES``.
            rank: The rank. Default: all ranks.

        Returns:
            The seconds.
        """
        total = 0.0
        reached = float("-inf")
        for span in self.spans:
            if span.lane != lane or (rank is not None and span.rank != rank):
                continue
            total += max(0.0, span.end_s - max(span.start_s, reached))
            reached = max(reached, span.end_s)
        return total

    def to_json(self) -> str:
        """The text that ``from_json`` reads."""
        spans, densities = (
            [asdict(row) for row in rows] for rows in (self.spans, self.densities)
        )
        return json.dumps({"schema": SCHEMA, "spans": spans, "densities": densities})

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Reads the text that ``to_json`` wrote.

        Args:
            text: The text.

        Returns:
            The trace.

        Raises:
            InvalidSetting: It is another text.
        """
        try:
            return cls._read(json.loads(text))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if isinstance(error, InvalidSetting):
                raise
            raise InvalidSetting(
                f"a trace cannot be read: {type(error).__name__}: {error}; save "
                "it again"
            ) from None

    @classmethod
    def _read(cls, data: Any) -> Trace:
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            given: object = type(data).__name__
            if isinstance(data, dict):
                given = data.get("schema")
            raise InvalidSetting(
                f"a trace of schema {SCHEMA} was expected, got {given}; "
                "write it again with this version of gradwire"
            )
        densities = data.get("densities", ())  # files of before there were any
        return cls.of(
            [_checked(Span(**row)) for row in data["spans"]],
            [_checked(StepDensity(**row)) for row in densities],
        )

    def save(self, path: Path | str) -> None:
        """Writes a file that ``load`` reads; one that is there is replaced at once.

        Raises ``InvalidSetting`` where it cannot be written.
        """
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: Path | str) -> Trace:
        """Reads a file that ``save`` wrote.

        Raises ``InvalidSetting`` for another one.
        """
        return cls.from_json(read_text(path, "Trace.save writes such a file"))


_Row = TypeVar("_Row", Span, StepDensity)
_MOST_S = 1e18
"""Bound of clock readings and counts in a file: sums and differences stay finite."""
_REMEDY = "save the trace again"


def _checked(row: _Row) -> _Row:
    """The row itself.

    Raises ``InvalidSetting`` unless each entry is of the type it is declared.
    """
    for entry in fields(row):
        value = getattr(row, entry.name)
        what = f"{entry.name} of a trace"
        if entry.type == "str" and not isinstance(value, str):
            raise invalid(what, value, "a text", _REMEDY)
        if entry.type == "int":
            check_whole(what, value, _REMEDY, least=-MOST)
        if entry.type == "float" or (
            entry.type == "float | None" and value is not None
        ):
            check_number(what, value, "a finite number", _REMEDY, -_MOST_S, _MOST_S)
    return row
