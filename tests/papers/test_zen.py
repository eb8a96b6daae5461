"""What must hold of any of ZEN's figures, each measured in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from papers import page
from papers.frame import Findings, Reproduction
from tests.papers.zen_small import ALL

pytestmark = pytest.mark.slow


def test_every_figure_is_registered_and_has_a_measure_of_its_own() -> None:
    paper: Reproduction = page("zen")
    assert {figure.name for figure in paper.figures} == set(ALL)
    assert len({figure.measure for figure in paper.figures}) == len(ALL)
    names = [figure.name for figure in paper.figures]
    assert names.index("figure15") < names.index("figure17b")


@pytest.mark.parametrize("name", ALL)
def test_claims_stand_somewhere_and_those_that_differ_say_why(
    small: dict[str, Findings], name: str
) -> None:
    assert small[name].claims
    for claim in small[name].claims:
        assert claim.place.startswith(("section", "theorem", "abstract"))
        assert claim.says
        assert claim.ours
        assert claim.why if claim.agrees is False else claim.agrees is None or not claim.why


@pytest.mark.parametrize("name", ALL)
def test_every_figure_is_drawn(small: dict[str, Findings], name: str, tmp_path: Path) -> None:
    paper: Reproduction = page("zen")
    draw = next(figure.draw for figure in paper.figures if figure.name == name)
    assert draw is not None
    assert draw(small[name].rows, tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
