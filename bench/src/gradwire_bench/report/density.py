"""Densities of a trace's steps, asked for, selected and averaged, as rows and as
words.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from gradwire.cli.report.table import Row
from gradwire.contract.trace.span import StepDensity, Trace


def rows(trace: Trace) -> list[Row]:
    """A row for each step, for ``table``; figures that differ among ranks are means
    over them.

    >>> trace = Trace.of([], [StepDensity(0, 7, 0.5, 800, 10_000, 100.0, 100, 380)])
    >>> for key, value in rows(trace)[0].items():
    ...     print(key, value)
    name step 7
    density_asked 0.01
    density_local 0.01
    density_actual 0.038
    wire_bytes 800.0
    """
    steps: dict[int, list[StepDensity]] = {}
    for density in trace.densities:
        steps.setdefault(density.step, []).append(density)
    return [
        {
            "name": f"step {step}",
            "density_asked": ranks[0].asked_density,
            "density_local": fmean(rank.local for rank in ranks),
            "density_actual": ranks[0].actual,
            "wire_bytes": fmean(rank.sent_bytes for rank in ranks),
        }
        for step, ranks in sorted(steps.items())
    ]


def summary(densities: Sequence[StepDensity]) -> str:
    """The densities over all steps given, in words; "" where nothing was selected.

    >>> summary([StepDensity(0, 7, 0.5, 800, 10_000, 100.0, 100, 380)])
    'density 0.038 (0.01 asked)'
    """
    if not densities:
        return ""
    actual = f"density {fmean(density.actual for density in densities):.3g}"
    asked = [d.asked_density for d in densities if d.asked_density is not None]
    return f"{actual} ({fmean(asked):.3g} asked)" if asked else actual
