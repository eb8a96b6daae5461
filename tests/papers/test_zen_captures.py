"""Captures of models' gradients, and figures 2 and 3, which are drawn from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire_bench.workloads.task import TrainingTask, class_loss
from papers.zen import captures as zen_captures
from papers.zen import sparsity as zen_sparsity
from papers.zen.captures import Source, captured
from tests.papers.small import RANKS, Measured, ask

pytestmark = pytest.mark.slow


class Bag(nn.Module):
    """The mean of a batch's embeddings, classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4)
        self.scores = nn.Linear(4, 3)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        scores_B3: Tensor = self.scores(self.embedding(tokens_BT).mean(1))
        return scores_B3


def batch(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([[rank, 7, 40 + step]]), torch.tensor([rank % 3])


TASK = TrainingTask(
    name="bag",
    description="a bag",
    make_model=Bag,
    make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch=batch,
    loss=class_loss,
    score=lambda model: 0.0,
    metric="none",
)


def test_a_capture_holds_the_rows_that_each_rank_touched() -> None:
    source = Source("bag", lambda: TASK, "embedding.weight")
    found = zen_captures.capture(source, 3, lambda *_: None)
    step = 40 + zen_captures.WARM_UP
    assert [one.tolist() for one in found.units] == [
        [0, 7, step],
        [1, 7, step],
        [2, 7, step],
    ]
    assert (found.num_units, found.width, found.numel) == (50, 4, 200)
    assert found.density == pytest.approx(0.06)
    elements = [4 * unit + i for unit in (0, 7, step) for i in range(4)]
    assert found.elements(1)[0].tolist() == elements


def test_captures_are_kept_and_made_anew_for_more_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        zen_captures.SOURCES, "bag", Source("bag", lambda: TASK, "embedding.weight")
    )
    first = captured(ask(tmp_path), "bag", 2)
    with monkeypatch.context() as patch:
        patch.setattr(zen_captures, "capture", lambda *_: pytest.fail("it is kept"))
        again = captured(ask(tmp_path), "bag", 2)
    assert replace(again, units=()) == replace(first, units=())
    assert [one.tolist() for one in again.units] == [
        one.tolist() for one in first.units
    ]
    assert len(captured(ask(tmp_path), "bag", 5).units) == 5
    assert len(captured(ask(), "bag", 2).units) == 2


# Figures 2 and 3


def test_sparsity_is_kept_as_a_profile_and_read_back(folder: Path) -> None:
    first = zen_sparsity.sparsity(ask(folder), "lstm", RANKS)
    assert zen_sparsity.sparsity(ask(folder), "lstm", RANKS) == first
    assert (folder / "sparsity-lstm.json").exists()
    fewer = zen_sparsity.sparsity(ask(folder), "lstm", 4)
    assert fewer.num_gradients == 4
    units = first.tensors[0].units
    assert (units.width, units.num_units, units.density) == (
        16,
        2000,
        pytest.approx(0.02),
    )


def test_zipfs_law_is_skewed_and_shares_much(measured: Measured) -> None:
    def of_lstm(figure: str) -> dict[str, Any]:
        rows = measured("zen", figure).rows
        return next(dict(row) for row in rows if row["name"] == "lstm")

    row = of_lstm("figure3a")
    shares = [row[f"fraction_{i}"] for i in range(1, 9)]
    assert shares[0] == max(shares)
    assert sum(shares) == pytest.approx(1)
    skews = of_lstm("figure3b")
    assert skews["skewness_128"] > skews["skewness_8"] > 3
    ratios = of_lstm("figure2b")
    assert 1 < ratios["densification_2"] < ratios["densification_32"] < 32
    assert "densification_64" not in ratios  # it would be extrapolated
