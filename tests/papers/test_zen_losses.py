"""Figure 18 of ZEN: which schemes' losses are the same, and that others are told apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradwire.collective.allgather_sparse import allgather_sparse
from gradwire.compress.topk import topk
from gradwire.exchange.pair import pair
from papers.frame import Findings
from papers.zen.losses import figure18
from tests.papers.figures import ask
from tests.papers.zen_small import LOSSES

pytestmark = pytest.mark.slow


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
