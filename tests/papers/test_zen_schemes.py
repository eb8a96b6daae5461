"""What the schemes send, how fast, and with which losses: figures 8, 15 and 18."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradwire.collective.allgather_sparse import allgather_sparse
from gradwire.compress.topk import topk
from gradwire.exchange.pair import pair
from gradwire.kernels.sparse.permutation import Permutation
from papers.zen.losses import figure18
from papers.zen.volumes import (
    ENTRY_BYTES,
    Traffic,
    busiest_bytes,
    dense_bytes,
    grown,
    sparcml_bytes,
    union,
)
from tests.papers.small import LOSSES, Measured, ask

pytestmark = pytest.mark.slow

Sets = list[set[int]]


def tensors(sets: Sets) -> list[Tensor]:
    return [torch.tensor(sorted(one), dtype=torch.int32) for one in sets]


index_sets = st.lists(st.sets(st.integers(0, 59), max_size=30), min_size=4, max_size=4)


@given(index_sets)
def test_volumes_are_those_of_sets(sets: Sets) -> None:
    numel, held = 60, tensors(sets)
    merged = set().union(*sets)
    assert union(held, numel).tolist() == sorted(merged)
    pairs = [len(sets[0] | sets[1]), len(sets[2] | sets[3])]
    sizes = grown(held, numel)
    assert sizes == [[len(one) for one in sets], pairs, [len(merged)]]
    ranged = Traffic.of(held, numel)
    parts = [[sum(i // 15 == part for i in one) for part in range(4)] for one in sets]
    assert ranged.pushed_WW.tolist() == parts
    assert ranged.pulled_W.tolist() == [
        sum(i // 15 == part for i in merged) for part in range(4)
    ]
    received = [sum(parts[i][j] for i in range(4) if i != j) for j in range(4)]
    sent = [sum(parts[i][j] for j in range(4) if i != j) for i in range(4)]
    assert ranged.push_bytes(8) == 8 * max(*received, *sent)
    first = max(max(map(len, sets[:2])), max(map(len, sets[2:])))
    assert sparcml_bytes(sizes, 4) == ENTRY_BYTES * (first + max(pairs))


def test_equal_and_disjoint_gradients_cost_what_the_paper_says() -> None:
    """Equations 1 and 2 at their two extremes: all overlap, and none."""
    world, numel, kept = 8, 8000, 100
    places = Permutation(numel).places
    apart = [
        torch.arange(kept, dtype=torch.int32) + kept * rank for rank in range(world)
    ]
    equal = [apart[0]] * world
    for sets, most in ((apart, world), (equal, 1)):
        found = busiest_bytes(sets, numel, places, grown(sets, numel))
        unions = [min(2**i, most) for i in range(3)]
        assert found["sparcml"] == ENTRY_BYTES * kept * sum(unions)
        assert found["agsparse"] == ENTRY_BYTES * kept * (world - 1)
        ideal = ENTRY_BYTES * kept * (world - 1) / world * (1 + most)
        assert 1 <= found["balanced"] / ideal < 2.5
        assert found["balanced"] == 2 * found["without_index"]
        assert found["zen"] <= found["balanced"]
        pull = ENTRY_BYTES * kept * most * 2 * (world - 1) / world
        assert (
            found["broadcast_in_turn"]
            == found["sparse_ps"] - pulled_by_all(sets, numel) + pull
        )
    assert dense_bytes(numel, world) == 2 * 7 / 8 * 4 * numel


def pulled_by_all(sets: list[Tensor], numel: int) -> int:
    return Traffic.of(sets, numel).pull_bytes(ENTRY_BYTES)


def test_ranges_carry_skew_and_hashed_parts_do_not(
    measured: Measured,
) -> None:
    for row in measured("zen", "figure8").rows:
        times = {
            key: float(str(row[key]))
            for key in ("sparse_ps", "balanced", "without_index")
        }
        assert times["without_index"] < times["balanced"] < times["sparse_ps"]


def test_schemes_that_lose_nothing_have_the_same_losses_and_others_are_found(
    measured: Measured,
) -> None:
    found = measured("zen", "figure18")
    assert [claim.agrees for claim in found.claims] == [True, True, True]
    for sparsity in ("natural", "sparsified"):
        rows = [row for row in found.rows if row["sparsity"] == sparsity]
        assert len({row["first_loss"] for row in rows}) == 1
        assert all(
            float(str(row["last_loss"])) < float(str(row["first_loss"])) for row in rows
        )
    lossy = pair(topk(density=0.01), allgather_sparse())
    part = replace(LOSSES[0], exchanges={**LOSSES[0].exchanges, "lossy": lossy})
    (claim,) = figure18(ask(), (part,), num_steps=5).claims
    assert claim.agrees is False
    assert claim.why
