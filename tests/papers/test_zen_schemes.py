"""What the schemes send and how fast that is: figures 8, 15 and 17b."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradwire.kernels.sparse.permutation import Permutation
from papers.frame import Findings, Row
from papers.zen import speed as zen_speed
from papers.zen.captures import Capture, captured
from papers.zen.volumes import (
    ENTRY_BYTES,
    Traffic,
    busiest_bytes,
    dense_bytes,
    grown,
    sparcml_bytes,
    union,
)
from tests.papers.figures import ask
from tests.papers.zen_small import MODELS, speed_rows

pytestmark = pytest.mark.slow

# Figure 8

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
    assert ranged.pulled_W.tolist() == [sum(i // 15 == part for i in merged) for part in range(4)]
    received = [sum(parts[i][j] for i in range(4) if i != j) for j in range(4)]
    sent = [sum(parts[i][j] for j in range(4) if i != j) for i in range(4)]
    assert ranged.push_bytes(8) == 8 * max(*received, *sent)
    first = max(max(map(len, sets[:2])), max(map(len, sets[2:])))
    assert sparcml_bytes(sizes, 4) == ENTRY_BYTES * (first + max(pairs))


def test_equal_and_disjoint_gradients_cost_what_the_paper_says() -> None:
    """Equations 1 and 2 at their two extremes: all overlap, and none."""
    world, numel, kept = 8, 8000, 100
    places = Permutation(numel).places
    apart = [torch.arange(kept, dtype=torch.int32) + kept * rank for rank in range(world)]
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
        assert found["broadcast_in_turn"] == found["sparse_ps"] - pulled_by_all(sets, numel) + pull
    assert dense_bytes(numel, world) == 2 * 7 / 8 * 4 * numel


def pulled_by_all(sets: list[Tensor], numel: int) -> int:
    return Traffic.of(sets, numel).pull_bytes(ENTRY_BYTES)


def test_ranges_carry_skew_and_hashed_parts_do_not(small: dict[str, Findings]) -> None:
    for row in small["figure8"].rows:
        times = {key: float(str(row[key])) for key in ("sparse_ps", "balanced", "without_index")}
        assert times["without_index"] < times["balanced"] < times["sparse_ps"]
    rows = [row for row in small["figure8"].rows if row["model"] == "lstm"]
    for key in ("agsparse", "sparcml", "balanced"):
        fewer, more = (float(str(row[key])) for row in rows)
        assert fewer < more


# Figures 15 and 17b


def test_figure_15_measures_the_captures_of_all_models(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run(bench: object, report: object) -> tuple[Row, ...]:
        asked.append(bench)
        found = [Capture.read(path) for path in bench.paths]  # type: ignore[attr-defined]
        assert [len(one.units) for one in found] == [4, 4]
        lstm, transformer = (captured(ask(folder), name, 32) for name in MODELS)
        assert found[0].units[1].tolist() == sorted(set(np.concatenate(lstm.units[8:16]).tolist()))
        assert found[1].units[1].tolist() == transformer.units[1].tolist()
        return speed_rows()

    monkeypatch.setattr(zen_speed, "run", run)
    links = zen_speed.Links(4, 1e6, 1)
    found = zen_speed.figure15(ask(folder), MODELS, links)
    assert found.rows == speed_rows()
    assert [bench.hosts for bench in asked] == [4]  # type: ignore[attr-defined]
