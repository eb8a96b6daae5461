"""What is refused, and what is said: by the C++ and by the reference alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gradwire.errors import InvalidSetting
from gradwire.kernels.libraries import reference_only
from gradwire.kernels.sparse.entries import Entries, Part, check_entries
from gradwire.kernels.sparse.formats.elias_fano import elias_fano
from gradwire.kernels.sparse.formats.hash_bitmap import hash_bitmap
from gradwire.kernels.sparse.merge import merge
from gradwire.kernels.sparse.partition import partition
from gradwire.kernels.sparse.permutation import Permutation
from gradwire.kernels.sparse.scatter import scatter_entries
from tests.each import each


@pytest.fixture(params=[False, True], ids=["compiled", "reference"], autouse=True)
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.param:
        yield
        return
    with reference_only():
        yield


def at(*indices: int) -> Entries:
    return Entries(torch.tensor(indices, dtype=torch.int32), torch.ones(len(indices)))


@each("wrong", [10, -1])
def test_an_index_outside_is_named(wrong: int) -> None:
    message = rf"1 must lie in \[0, 10\), got {wrong}"
    with pytest.raises(InvalidSetting, match=message):
        partition(at(3, wrong), 10, 2)
    with pytest.raises(InvalidSetting, match=message):
        partition(at(3, wrong), 10, 2, Permutation(10))
    with pytest.raises(InvalidSetting, match=message):
        Permutation(10).places(at(3, wrong).indices_K)
    with pytest.raises(
        InvalidSetting, match=r"place 1 must lie in \[0, 10\), not below"
    ):
        merge([at(1), at(3, wrong)], 10)
    out_N = torch.zeros(10)
    with pytest.raises(InvalidSetting, match=message):
        scatter_entries(at(3, wrong), Part(10), out_N)
    assert not out_N.any()


def test_a_merge_takes_ascending_places_of_one_width_and_room_for_all() -> None:
    with pytest.raises(InvalidSetting, match="not below the one before it, got 2"):
        merge([at(1, 2), at(4, 2)], 10)
    with pytest.raises(InvalidSetting, match="width must be 1"):
        merge([at(1), Entries(at(1).indices_K, torch.ones(2), 2)], 10)
    with pytest.raises(InvalidSetting, match="room must be 3 places"):
        merge(
            [at(1, 2), at(1)],
            10,
            room=(torch.zeros(2, dtype=torch.int32), torch.zeros(3)),
        )


@each("wrong", [(4, 3), (3, 10), (-1, 3)])
def test_elias_and_fanos_code_takes_ascending_places_only(
    wrong: tuple[int, int],
) -> None:
    with pytest.raises(InvalidSetting, match="indices must ascend"):
        elias_fano().encode(at(*wrong), 10)


@each(
    "field, given, says",
    [
        ("high", [0b11], "bitmap must be one of 3 set bits"),
        ("high", [0b1111], "bitmap must be one of 3 set bits"),
        ("high", [0b1000_0011], "bitmap must be one of 3 set bits"),
        ("low", [0b111], "elias_fano must be ascending places"),
        ("low", [0b001], "elias_fano must be ascending places"),
    ],
)
def test_codes_that_no_places_have_are_refused(
    field: str, given: list[int], says: str
) -> None:
    """Of places below 9, two of which share their high bits."""
    payload = elias_fano().encode(at(0, 1, 8), 9)
    assert payload["high"].tolist() == [0b100_0011]
    assert payload["low"].tolist() == [0b010]
    payload[field].copy_(torch.tensor(given, dtype=torch.uint8))
    out_N = torch.zeros(9)
    with pytest.raises(InvalidSetting, match=says):
        elias_fano().scatter(payload, Part(9), out_N)
    assert not out_N.any()


@each("wrong", [(3, 3), (4, 3), (3, 10), (-1, 3)])
def test_a_bitmap_takes_ascending_indices_only(wrong: tuple[int, int]) -> None:
    with pytest.raises(InvalidSetting, match="indices must ascend"):
        hash_bitmap().encode(at(*wrong), 10)


@each("bits", [[0b11, 0], [0b111, 0b100], [0b111, 0b10000], [0b111, 0b100_0001]])
def test_bits_that_do_not_fit_the_values_are_refused(bits: list[int]) -> None:
    payload = hash_bitmap().encode(at(0, 1, 2), 10)
    payload["bits"].copy_(torch.tensor(bits, dtype=torch.uint8))
    out_N = torch.zeros(10)
    with pytest.raises(InvalidSetting, match="bitmap must be one of 3 set bits"):
        hash_bitmap().decode(payload, 10)
    with pytest.raises(InvalidSetting, match="bitmap must be one of 3 set bits"):
        hash_bitmap().scatter(payload, Part(10), out_N)
    assert not out_N.any()


def test_what_was_made_for_another_vector_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="permutation must be one of 10 units"):
        Part(10, permutation=Permutation(11))
    with pytest.raises(InvalidSetting, match="permutation must be one of 10 units"):
        partition(at(1), 10, 2, Permutation(11))
    with pytest.raises(InvalidSetting, match=r"rank must be in \[0, 2\)"):
        Part(10, 2, 2)
    with pytest.raises(
        InvalidSetting, match="out_N must be a contiguous vector of 10 units"
    ):
        scatter_entries(at(1), Part(10), torch.zeros(11))
    with pytest.raises(InvalidSetting, match="2147483647"):
        Permutation(2**31)


@each(
    "wrong",
    [
        Entries(torch.zeros(2, dtype=torch.int64), torch.zeros(2)),
        Entries(torch.zeros(2, dtype=torch.int32), torch.zeros(3)),
        Entries(torch.zeros(2, dtype=torch.int32), torch.zeros(2), 2),
        Entries(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)),
        Entries(torch.zeros(2, dtype=torch.int32), torch.zeros(0), 0),
    ],
)
def test_entries_that_do_not_belong_together_are_refused(wrong: Entries) -> None:
    with pytest.raises(InvalidSetting):
        check_entries(wrong)
