"""What is refused, and what is said: by the C++ and by the reference alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gradwire.errors import InvalidSetting
from gradwire.kernels._build import reference_only
from gradwire.payload import Payload
from gradwire.sparse.entries import Entries, check_entries, nonzero
from gradwire.sparse.formats.bitmap import bitmap
from gradwire.sparse.formats.coo import coo
from gradwire.sparse.formats.hash_bitmap import hash_bitmap
from gradwire.sparse.merge import Accumulator
from gradwire.sparse.partition import partition, partition_into_coo
from gradwire.sparse.parts import Part, parts_of
from gradwire.sparse.permutation import Permutation
from gradwire.sparse.scatter import scatter


@pytest.fixture(params=[False, True], ids=["compiled", "reference"], autouse=True)
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.param:
        yield
        return
    with reference_only():
        yield


def at(*indices: int) -> Entries:
    return Entries(torch.tensor(indices, dtype=torch.int32), torch.ones(len(indices)))


@pytest.mark.parametrize("wrong", [10, -1])
def test_an_index_outside_is_named(wrong: int) -> None:
    message = rf"1 must lie in \[0, 10\), got {wrong}"
    with pytest.raises(InvalidSetting, match=message):
        partition(at(3, wrong), 10, 2)
    with pytest.raises(InvalidSetting, match=message):
        partition(at(3, wrong), 10, 2, Permutation(10))
    with pytest.raises(InvalidSetting, match=message):
        Permutation(10).places(at(3, wrong).indices_K)
    with pytest.raises(InvalidSetting, match=message):
        Accumulator(10).add(at(3, wrong))
    out_N = torch.zeros(10)
    with pytest.raises(InvalidSetting, match=message):
        scatter(at(3, wrong), Part(10), out_N)
    assert not out_N.any()


def test_nothing_is_added_where_a_place_is_outside() -> None:
    total = Accumulator(4)
    total.add(at(1))
    with pytest.raises(InvalidSetting):
        total.add(at(2, 4))
    assert total.entries().indices_K.tolist() == [1]


@pytest.mark.parametrize("wrong", [(3, 3), (4, 3), (3, 10), (-1, 3)])
def test_a_bitmap_takes_ascending_indices_only(wrong: tuple[int, int]) -> None:
    with pytest.raises(InvalidSetting, match="indices must ascend"):
        hash_bitmap().encode(at(*wrong), 10)


@pytest.mark.parametrize("bits", [[0b11, 0], [0b111, 0b100], [0b111, 0b10000], [0b111, 0b100_0001]])
def test_bits_that_do_not_fit_the_values_are_refused(bits: list[int]) -> None:
    payload = hash_bitmap().encode(at(0, 1, 2), 10)
    payload["bits"].copy_(torch.tensor(bits, dtype=torch.uint8))
    out_N = torch.zeros(10)
    with pytest.raises(InvalidSetting, match="bitmap must be one of 3 set bits"):
        hash_bitmap().decode(payload, 10)
    with pytest.raises(InvalidSetting, match="bitmap must be one of 3 set bits"):
        hash_bitmap().scatter(payload, Part(10), out_N)
    with pytest.raises(InvalidSetting, match="bitmap must be one of 3 set bits"):
        hash_bitmap().fill([payload], [Part(10)], out_N)
    assert not out_N.any()


def test_a_bitmap_by_index_is_no_bitmap_by_place() -> None:
    payload = bitmap().encode(at(0, 1), 10)
    with pytest.raises(InvalidSetting, match="use hash_bitmap"):
        bitmap().scatter(payload, Part(10, permutation=Permutation(10)), torch.zeros(10))


def test_what_was_made_for_another_vector_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="permutation must be one of 10 units"):
        Part(10, permutation=Permutation(11))
    with pytest.raises(InvalidSetting, match="permutation must be one of 10 units"):
        partition(at(1), 10, 2, Permutation(11))
    with pytest.raises(InvalidSetting, match=r"rank must be in \[0, 2\)"):
        Part(10, 2, 2)
    with pytest.raises(InvalidSetting, match="out_N must be a contiguous vector of 10 units"):
        scatter(at(1), Part(10), torch.zeros(11))
    with pytest.raises(InvalidSetting, match="sums must be a contiguous vector of 8"):
        Accumulator(4, 2, sums=torch.zeros(4))
    with pytest.raises(InvalidSetting, match="width must be 2"):
        Accumulator(4, 2).add(at(1))
    with pytest.raises(InvalidSetting, match="2147483647"):
        Permutation(2**31)
    with pytest.raises(InvalidSetting, match="size of a coo payload of 10 units"):
        coo().received(9, 10)
    buffer = torch.zeros(20, dtype=torch.uint8)
    with pytest.raises(InvalidSetting, match="ask coo_slots_bytes"):
        partition_into_coo(at(1, 2), 10, 2, buffer=buffer)


@pytest.mark.parametrize(
    "wrong",
    [
        Entries(torch.zeros(2, dtype=torch.int64), torch.zeros(2)),
        Entries(torch.zeros(2, dtype=torch.int32), torch.zeros(3)),
        Entries(torch.zeros(2, dtype=torch.int32), torch.zeros(2), 2),
        Entries(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)),
        Entries(torch.zeros(2, dtype=torch.int32), torch.zeros(0), 0),
    ],
)
def test_entries_belong_together(wrong: Entries) -> None:
    with pytest.raises(InvalidSetting):
        check_entries(wrong)


def test_fill_wants_the_parts_of_all_ranks() -> None:
    shuffle = Permutation(10, 1)
    parts = parts_of(10, 2, shuffle)
    payloads: list[Payload] = []
    for part in parts:
        total = Accumulator(part.length)
        total.add(partition(at(3, 4), 10, 2, shuffle).of(part.rank))
        payloads.append(total.encode(hash_bitmap()))
    out_N = torch.full((10,), 7.0)
    hash_bitmap().fill(payloads, parts, out_N)
    assert out_N.nonzero().flatten().tolist() == [3, 4]
    with pytest.raises(InvalidSetting, match="parts must be"):
        hash_bitmap().fill(payloads[::-1], parts[::-1], out_N)
    with pytest.raises(InvalidSetting, match="parts must be"):
        hash_bitmap().fill(payloads[:1], parts, out_N)


def test_nonzero_units_of_a_dense_vector() -> None:
    dense_N = torch.tensor([0.0, -0.0, 3.0, 0.0, torch.nan, 0.0, 5.0])
    found = nonzero(dense_N)
    assert found.indices_K.tolist() == [2, 4, 6]
    rows = nonzero(dense_N, 3)
    assert rows.indices_K.tolist() == [0, 1, 2]
    assert rows.values[-3:].tolist() == [5.0, 0.0, 0.0]
    assert nonzero(torch.zeros(0), 3).num == 0
