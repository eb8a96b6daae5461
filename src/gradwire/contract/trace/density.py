"""StepDensity: the density that one rank was asked for, took and got in one step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepDensity:
    """The elements that one rank selected in one step, counted over its messages that select.

    ``numel`` elements could be selected; ``asked`` of them were asked for (density times numel;
    None where a codec has no density). This rank ``selected`` so many, and ``arrived`` are in the
    mean: the union over ranks, which gradient build-up makes larger (DEFT, section 3.1).
    ``sent_bytes`` counts the bytes that the rank sent in the whole step, dense messages included;
    ``end_s`` is the end of the step, on the clock of the spans.

    >>> StepDensity(0, 7, 0.5, 800, numel=10_000, asked=100.0, selected=100, arrived=380).actual
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
