"""What must hold of any of ZEN's figures, each measured in small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.collective.allgather_sparse import allgather_sparse
from gradwire.compress.topk import topk
from gradwire.exchange.pair import pair
from papers import page
from papers.frame import Findings, Reproduction
from papers.zen.losses import figure18
from tests.papers.figures import ask, law_of_figures
from tests.papers.zen_small import ALL, LOSSES

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


def test_schemes_that_lose_nothing_have_the_same_losses(small: dict[str, Findings]) -> None:
    found = small["figure18"]
    assert [claim.agrees for claim in found.claims] == [True, True]
    for sparsity in ("natural", "sparsified"):
        rows = [row for row in found.rows if row["sparsity"] == sparsity]
        assert len({row["first_loss"] for row in rows}) == 1
        assert all(float(str(row["last_loss"])) < float(str(row["first_loss"])) for row in rows)


def test_a_scheme_that_loses_something_is_found() -> None:
    lossy = pair(topk(density=0.01), allgather_sparse())
    natural = LOSSES[0]
    part = replace(natural, exchanges={**natural.exchanges, "lossy": lossy})
    (claim,) = figure18(ask(), (part,), num_steps=5).claims
    assert claim.agrees is False
    assert claim.why
