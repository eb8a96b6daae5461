"""The smallest format is chosen, from what all ranks know, and the reason is said."""

from __future__ import annotations

import pytest
import torch

from gradwire.sparse.choose import choose
from gradwire.sparse.formats.blocks import blocks
from gradwire.sparse.formats.coo import coo
from gradwire.sparse.formats.dense import dense
from gradwire.sparse.formats.hash_bitmap import hash_bitmap


@pytest.mark.parametrize(
    ("count", "chosen"),
    [(0, coo()), (30, coo()), (32, hash_bitmap()), (500, hash_bitmap()), (1000, dense())],
)
def test_few_entries_take_coordinates_and_many_none(count: int, chosen: object) -> None:
    found = choose(count, 1000)
    assert found.format == chosen
    assert found.size_bytes == found.format.size_bytes(count, 1000)
    assert found.size_bytes == min(size for _, size in found.sizes)


def test_blocks_are_considered_where_their_number_is_known() -> None:
    assert choose(512, 100_000, num_blocks=2, block=256).format == blocks(block=256)
    assert choose(512, 100_000, num_blocks=300, block=256).format == coo()
    assert blocks() not in dict(choose(512, 100_000).sizes)


def test_wide_units_and_other_dtypes_count() -> None:
    assert choose(40, 1000).format == hash_bitmap()
    assert choose(30, 1000, width=64).size_bytes == 30 * (4 + 256)
    assert choose(999, 1000, width=64).format == hash_bitmap()
    assert choose(900, 1000, dtype=torch.float64).size_bytes == 900 * 8 + 125


def test_the_reason_names_all_sizes() -> None:
    why = choose(1000, 25_000, hashed=False, num_blocks=98).why
    assert why == (
        "bitmap: 7.12 kB for 1000 of 25000 units, against 8.00 kB as coo, 100.0 kB as dense, "
        "100.7 kB as blocks"
    )
