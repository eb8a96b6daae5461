"""What must hold of any of ZEN's figures, each measured in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from papers import page
from papers.frame import Findings, Reproduction
from tests.papers.figures import law_of_figures
from tests.papers.zen_small import ALL

pytestmark = pytest.mark.slow


def test_every_figure_is_registered_and_has_a_measure_of_its_own() -> None:
    paper: Reproduction = page("zen")
    assert {figure.name for figure in paper.figures} == set(ALL)
    assert len({figure.measure for figure in paper.figures}) == len(ALL)
    names = [figure.name for figure in paper.figures]
    assert names.index("figure15") < names.index("figure17b")
    assert all(figure.draw is not None for figure in paper.figures)


@pytest.mark.parametrize("name", ALL)
def test_figures(small: dict[str, Findings], name: str, tmp_path: Path) -> None:
    law_of_figures("zen", name, small[name], tmp_path)
