"""Any figure of any paper, measured in small: rows, claims that stand somewhere, and a
picture.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire_bench.errors import TestbedUnavailable
from gradwire_bench.schedule import schedule
from papers import names, page
from papers.frame import Reproduction
from papers.ssfusion import replayed
from papers.usbyte.error import TABLE_4, table4
from tests.papers.small import SMALL, Measured, ask

pytestmark = pytest.mark.slow

PLACES = ("section", "table", "figure", "experiment", "insight", "theorem", "abstract")
ELSEWHERE = {
    "deft": {"table1", "figure7", "cost", "figure9", "training"},
    "hipress": {"table5", "table7", "figure12", "slots_measured"},
    "ssfusion": {"table1", "figure11_replayed"},
    "usbyte": {"table4"},
    "zen": set[str](),
}
"""Figures that other tests measure, or that take what is not here."""
MEASURED_TWICE = {
    ("hipress", "servers_measured"),
    ("hipress", "pipeline"),
    ("usbyte", "figure17"),
}
"""Figures of real ranks that slow tests of their own papers measure as well."""


@pytest.mark.parametrize("paper", names())
def test_every_figure_has_a_measure_of_its_own(paper: str) -> None:
    found: Reproduction = page(paper)
    assert {one.name for one in found.figures} == {*SMALL[paper], *ELSEWHERE[paper]}
    assert len({one.measure for one in found.figures}) == len(found.figures)


@pytest.mark.parametrize(
    ("paper", "name"),
    [
        pytest.param(
            paper,
            name,
            marks=[pytest.mark.nightly] if (paper, name) in MEASURED_TWICE else [],
        )
        for paper, small in SMALL.items()
        for name in small
    ],
)
def test_claims_say_why_they_differ(
    paper: str, name: str, measured: Measured, tmp_path: Path
) -> None:
    found = measured(paper, name)
    assert found.rows
    assert found.claims
    for claim in found.claims:
        assert claim.place.startswith(PLACES)
        assert claim.says
        assert claim.ours
        is_measured = not claim.ours.startswith("not measured")
        assert bool(claim.why) == (claim.agrees is not True) or not is_measured, claim
    draw = next(one.draw for one in page(paper).figures if one.name == name)
    if draw is not None:
        assert draw(found.rows, tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_testbed_the_papers_column_stands_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TestbedUnavailable("no root here")

    monkeypatch.setattr(schedule, "run", refuse)
    monkeypatch.setattr(replayed, "run", refuse)
    found = table4(ask())
    assert {row["model"]: row["fraction_error_paper"] for row in found.rows} == TABLE_4
    assert all("measured_s" not in row for row in found.rows)
    assert found.claims[0].agrees is None
    nothing = replayed.figure11_replayed(ask())
    assert nothing.rows == ()
    for one in (found, nothing):
        assert not one.complete
        assert "no root here" in one.notes[0]
