"""Densities in reports: a row a step, and words beside a timeline."""

from __future__ import annotations

import pytest

from gradwire.contract.trace.span import Span, StepDensity, Trace
from gradwire_bench.report import density


def of(rank: int, step: int, asked: float | None = 100.0) -> StepDensity:
    """Of 10,000 elements: 1 % asked for, a little more on every rank, 3.8 % in the
    mean.
    """
    return StepDensity(rank, step, 0.5, 800 + rank, 10_000, asked, 100 + rank, 380)


TRACE = Trace.of(
    [Span(0, "backward", "backward", 0.0, 0.5, step=1)],
    [of(1, 2), of(0, 2), of(1, 1), of(0, 1)],
)


def test_each_step_has_a_row_with_the_means_over_ranks() -> None:
    rows = density.rows(TRACE)
    assert [row["name"] for row in rows] == ["step 1", "step 2"]
    assert rows[0] == {
        "name": "step 1",
        "density_asked": 0.01,
        "density_local": pytest.approx(0.01005),
        "density_actual": 0.038,
        "wire_bytes": 800.5,
    }
    assert density.rows(Trace()) == []
    assert (
        density.rows(Trace.of([], [of(0, 1, asked=None)]))[0]["density_asked"] is None
    )
