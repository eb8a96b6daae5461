"""The smallest format is chosen, from what all ranks know, and the reason is said."""

from __future__ import annotations

from math import log2

import pytest
import torch

from gradwire.kernels.sparse.choose import smallest_format
from gradwire.kernels.sparse.formats.bitmap import bitmap
from gradwire.kernels.sparse.formats.blocks import blocks
from gradwire.kernels.sparse.formats.coo import coo
from gradwire.kernels.sparse.formats.dense import dense
from gradwire.kernels.sparse.formats.elias_fano import elias_fano
from gradwire.kernels.sparse.formats.hash_bitmap import hash_bitmap

OF_RANGES = (dense(), coo(), bitmap(), elias_fano(), blocks())
"""All formats that can carry a range of indices."""


@pytest.mark.parametrize(
    ("count", "chosen"),
    [(1, elias_fano()), (100, elias_fano()), (300, hash_bitmap()), (1000, dense())],
)
def test_few_entries_take_a_code_many_bits_and_all_none(count: int, chosen: object) -> None:
    found = smallest_format(count, 1000)
    assert found.format == chosen
    assert found.size_bytes == found.format.size_bytes(count, 1000)
    assert found.size_bytes == min(size for _, size in found.sizes)


def test_blocks_are_considered_where_their_number_is_known() -> None:
    among = (coo(), blocks(block=256))
    assert smallest_format(512, 100_000, num_blocks=2, among=among).format == blocks(block=256)
    assert smallest_format(512, 100_000, num_blocks=300, among=among).format == coo()
    assert blocks() not in dict(smallest_format(512, 100_000, among=OF_RANGES).sizes)


def test_wide_units_and_other_dtypes_count() -> None:
    among = (dense(), coo(), hash_bitmap())
    assert smallest_format(40, 1000, among=among).format == hash_bitmap()
    assert smallest_format(30, 1000, width=64, among=among).size_bytes == 30 * (4 + 256)
    assert smallest_format(999, 1000, width=64).format == hash_bitmap()
    assert smallest_format(900, 1000, dtype=torch.float64).size_bytes == 900 * 8 + 125


def test_the_reason_names_all_sizes() -> None:
    why = smallest_format(1000, 25_000, among=OF_RANGES, num_blocks=98).why
    assert why == (
        "elias_fano: 4.82 kB for 1000 of 25000 units, against 7.12 kB as bitmap, 8.00 kB as coo, "
        "100.0 kB as dense, 100.7 kB as blocks"
    )


@pytest.mark.parametrize("share", [0.001, 0.01, 0.03, 0.1])
def test_a_code_is_near_the_entropy_up_to_a_tenth(share: float) -> None:
    """In bits of an entry: at most 0.6 more, where a hash bitmap spends 1 / share."""
    count, length = round(share * 1_250_000), 1_250_000
    entropy = (-share * log2(share) - (1 - share) * log2(1 - share)) / share
    bits = 8 * (elias_fano().size_bytes(count, length) - 4 * count) / count
    assert entropy <= bits <= entropy + 0.6
    assert bits < 1 / share
