"""Measured sparsity: rows and elements told apart, batches as ranks, ranks that
agree.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import InvalidSetting
from gradwire.planning.data.sparsity import SparsityProfile
from gradwire_lab.planning.index_sets import unit_sparsity
from gradwire_lab.planning.zeros import (
    measure_group_sparsity,
    measure_sparsity,
)
from tests.runtime.ranks import Ranks

ROWS, WIDTH = 600, 8


class Model(nn.Module):
    """A table with a dense gradient, one with a sparse one, a masked vector and a dense
    matrix.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, WIDTH)
        self.rows = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.gate = nn.Parameter(torch.zeros(1000))
        self.last = nn.Linear(WIDTH, 20)

    def forward(self, words: Tensor) -> Tensor:
        found = self.table(words).sum(0) + self.rows(words).sum(0)
        return self.last(F.silu(found)).sum() + self.gate[words].sum()


def steps(model: nn.Module, seed: int = 0) -> Callable[[], None]:
    """One backward a call, each with words of its own."""
    draw = torch.Generator().manual_seed(seed)

    def step() -> None:
        model(torch.randint(0, ROWS, (30,), generator=draw)).backward()

    return step


@pytest.mark.smoke
def test_sparsity_of_a_model_in_one_process_is_measured_by_tensor() -> None:
    model = Model()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    reported: list[float] = []
    found = measure_sparsity(
        model,
        steps(model),
        num_gradients=6,
        advance=lambda amount, note: reported.append(amount),
    )
    assert sum(reported) == found.num_gradients == 6
    assert {t.name: t.units.width for t in found.tensors} == {
        "table.weight": WIDTH,
        "rows.weight": WIDTH,
        "gate": 1,
    }
    draw = torch.Generator().manual_seed(0)
    sets = [
        np.unique(
            torch.randint(0, ROWS, (30,), generator=draw).numpy().astype(np.int32)
        )
        for _ in range(6)
    ]
    of = {tensor.name: tensor for tensor in found.tensors}
    table, rows, gate = of["table.weight"], of["rows.weight"], of["gate"]
    assert table.units == rows.units == unit_sparsity(sets, WIDTH, ROWS)
    assert [one.is_rows for one in (table, rows, gate)] == [False, True, False]
    assert gate.units == unit_sparsity(sets, 1, 1000)
    blocks = [np.unique(one * WIDTH // 256) for one in sets]
    assert table.blocks == unit_sparsity(blocks, 256, -(-ROWS * WIDTH // 256))
    assert not table.units.is_extrapolated(6 - 2)
    assert table.units.is_extrapolated(8)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert SparsityProfile.parse(found.to_json()) == found


def test_the_sparsity_of_what_a_sparsifier_takes_is_measured() -> None:
    model = Model()
    found = measure_sparsity(
        model,
        steps(model),
        num_gradients=3,
        compressor="topk",
        settings={"density": 0.05},
    )
    assert (found.compressor, found.settings) == ("topk", {"density": 0.05})
    assert {t.name for t in found.tensors} == {
        "table.weight",
        "rows.weight",
        "last.weight",
    }
    for (
        one
    ) in found.tensors:  # what comes as rows travels as rows, whatever the others take
        assert one.is_rows == (one.name == "rows.weight") == (one.units.width == WIDTH)
        if not one.is_rows:
            assert one.units.density == pytest.approx(0.05, abs=1e-3)
    with pytest.raises(InvalidSetting, match="onebit"):
        measure_sparsity(model, steps(model), compressor="onebit")


def among_ranks(rank: int, world: int) -> str:
    model = Model()
    model.rows.sparse = False
    wrapped = DistributedDataParallel(model)
    return measure_group_sparsity(
        wrapped, steps(wrapped, seed=rank), num_gradients=5
    ).to_json()


@pytest.mark.multi
def test_ranks_share_the_work_and_return_the_same() -> None:
    """Each brings its own batches; under DDP too, whose means would overlap wholly."""
    with closing(Ranks(2)) as ranks:
        one, other = map(SparsityProfile.parse, ranks.run(among_ranks))
    assert one == other
    assert one.num_gradients == 6
    draws = [torch.Generator().manual_seed(rank) for rank in range(2)]
    sets = [
        np.unique(
            torch.randint(0, ROWS, (30,), generator=draw).numpy().astype(np.int32)
        )
        for draw in draws
        for _ in range(3)
    ]
    table = next(t for t in one.tensors if t.name == "table.weight")
    assert table.units == unit_sparsity(sets, WIDTH, ROWS)
