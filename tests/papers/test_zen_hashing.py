"""What hashing does to entries: theorem 2, figures 16 and 17a."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.kernels.sparse.permutation import Permutation
from gradwire_lab.hashing import algorithm_1
from papers.frame import Findings
from papers.zen import balance as zen_balance
from papers.zen import formats as zen_formats
from papers.zen import hashing as zen_hashing
from tests.papers.zen_small import by_name, claim_of

pytestmark = pytest.mark.slow

# Theorem 2


def test_hashed_parts_are_balanced_and_ranges_are_not(small: dict[str, Findings]) -> None:
    rows = by_name(small["theorem2"])
    assert claim_of(small["theorem2"].claims, "probability").agrees is True
    assert rows["all in front, 16 ranks"]["push_by_ranges"] == 16
    for row in rows.values():
        for way in zen_balance.WAYS:
            assert row[f"{way}_imbalance"] <= row[f"{way}_bound"]  # type: ignore[operator]


def test_a_part_beyond_the_bound_fails_the_theorem(small: dict[str, Findings]) -> None:
    first, *rest = small["theorem2"].rows
    assert isinstance(first["push_bound"], float)
    worse = {**first, "push_imbalance": 1.01 * first["push_bound"]}
    assert claim_of(zen_balance.claims([worse, *rest]), "probability").agrees is False
    uneven = {**first, "of": "elements", "pull_imbalance": 1.2}
    assert claim_of(zen_balance.claims([uneven]), "practical").agrees is False


# Figure 16


@given(
    st.sets(st.integers(0, 2**31 - 1), min_size=1, max_size=200),
    st.integers(1, 5),
    st.sampled_from((0.5, 1.0, 2.0)),
    st.integers(1, 4),
)
def test_algorithm_1_places_every_entry_once(
    indices: set[int], parts: int, memory: float, hashes: int
) -> None:
    indices_K = torch.tensor(sorted(indices), dtype=torch.int32)
    found = zen_hashing.place(indices_K, parts, memory, hashes)
    assert found.num_entries == len(indices)
    assert 0 < sum(found.placed) <= min(len(indices), found.num_words)
    assert 0 <= found.serial_share < 1
    assert 1 <= found.tries <= hashes


@pytest.mark.skipif(find_spec("triton") is None, reason="no triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is not interpreted")
def test_what_is_counted_is_what_the_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    entries = zen_hashing._entries(60_000, "cpu")
    counted = zen_hashing.place(entries.indices_K, 2, 2.0, 3, waves=3)
    with np.errstate(all="ignore"):
        _, spill = algorithm_1.algorithm_1(entries, 60_000, 2, Permutation(60_000), rehashes=3)
    share = (spill.serial + spill.fallback) / entries.indices_K.numel()
    assert share == pytest.approx(counted.serial_share, abs=0.015)
    assert share > 0


def test_on_a_gpu_the_kernel_is_timed_with_the_memory_of_the_row(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Findings]
) -> None:
    asked: list[dict[str, int]] = []
    monkeypatch.setattr(algorithm_1, "algorithm_1", lambda *_, **memory: asked.append(memory))
    entries = zen_hashing._entries(10_000, "cpu")
    assert zen_hashing.kernel_s(entries, 10_000, 1.5, 2) >= 0
    expected = {"rehashes": 2, "parallel": round(1.5 * entries.indices_K.numel())}
    assert asked == [expected] * (zen_hashing.GPU_REPEATS + 1)
    v100, other = "Tesla V100-SXM2-32GB", "another"
    for seconds, gpu, agrees in ((5e-3, v100, True), (8e-3, v100, False), (1e-3, other, None)):
        rows = [{**row, "gpu_s": seconds, "gpu": gpu} for row in small["figure16"].rows]
        assert claim_of(zen_hashing.claims(rows), "around 6 ms").agrees is agrees


# Figure 17a


def test_sizes_are_those_of_the_formulas() -> None:
    numel = 2**12
    indices_K = torch.arange(0, numel, 8, dtype=torch.int32)
    kept, part = len(indices_K), numel // zen_formats.SERVERS
    sizes = {key: zen_formats.encoded_bytes(key, indices_K, numel) for key in zen_formats.FORMATS}
    assert sizes == {
        "hash_bitmap": 4 * kept + zen_formats.SERVERS * part // 8,
        "coo": 8 * kept,
        "bitmap": 4 * kept + zen_formats.SERVERS * numel // 8,
        "blocks": numel // 256 * (4 + 256 * 4),
    }
