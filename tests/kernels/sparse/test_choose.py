"""The smallest format is chosen, from what all ranks know."""

from __future__ import annotations

from math import log2

from gradwire.kernels.sparse.choose import OF_PARTS, smallest
from gradwire.kernels.sparse.formats.dense import dense
from gradwire.kernels.sparse.formats.elias_fano import elias_fano
from gradwire.kernels.sparse.formats.hash_bitmap import hash_bitmap
from tests.each import each


@each(
    "count, chosen",
    [(1, elias_fano()), (100, elias_fano()), (300, hash_bitmap()), (1000, dense())],
)
def test_few_entries_take_a_code_many_bits_and_all_none(
    count: int, chosen: object
) -> None:
    found = smallest(OF_PARTS, count, 1000)
    assert found == chosen
    sizes = [form.size_bytes(count, 1000) for form in OF_PARTS]
    assert found.size_bytes(count, 1000) == min(sizes)


@each("share", [0.001, 0.01, 0.03, 0.1])
def test_a_code_is_near_the_entropy_up_to_a_tenth(share: float) -> None:
    """In bits of an entry: at most 0.6 more, where a hash bitmap spends 1 / share."""
    count, length = round(share * 1_250_000), 1_250_000
    entropy = (-share * log2(share) - (1 - share) * log2(1 - share)) / share
    bits = 8 * (elias_fano().size_bytes(count, length) - 4 * count) / count
    assert entropy <= bits <= entropy + 0.6
    assert bits < 1 / share
