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
from papers.zen import balance as zen_balance
from papers.zen import formats as zen_formats
from papers.zen import hashing as zen_hashing
from tests.papers.small import Measured

pytestmark = pytest.mark.slow


def test_hashed_parts_are_balanced_and_ranges_are_not(
    measured: Measured,
) -> None:
    rows = {str(row["name"]): row for row in measured("zen", "theorem2").rows}
    assert rows["all in front, 16 ranks"]["push_by_ranges"] == 16
    for row in rows.values():
        for way in zen_balance.WAYS:
            assert row[f"{way}_imbalance"] <= row[f"{way}_bound"]  # type: ignore[operator]


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
def test_what_is_counted_is_what_the_kernel_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    entries = zen_hashing._entries(60_000, "cpu")
    counted = zen_hashing.place(entries.indices_K, 2, 2.0, 3, waves=3)
    with np.errstate(all="ignore"):
        _, spill = algorithm_1.algorithm_1(
            entries, 60_000, 2, Permutation(60_000), rehashes=3
        )
    share = (spill.serial + spill.fallback) / entries.indices_K.numel()
    assert share == pytest.approx(counted.serial_share, abs=0.015)
    assert share > 0


def test_sizes_are_those_of_the_formulas() -> None:
    numel = 2**12
    indices_K = torch.arange(0, numel, 8, dtype=torch.int32)
    kept, part = len(indices_K), numel // zen_formats.SERVERS
    sizes = {
        key: zen_formats.encoded_bytes(key, indices_K, numel)
        for key in zen_formats.FORMATS
    }
    assert sizes == {
        "hash_bitmap": 4 * kept + zen_formats.SERVERS * part // 8,
        "coo": 8 * kept,
        "bitmap": 4 * kept + zen_formats.SERVERS * numel // 8,
        "blocks": numel // 256 * (4 + 256 * 4),
    }
