"""Algorithm 1 on a CPU: every entry in its part once, whatever memory it has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import InvalidSetting
from gradwire.kernels.libraries import reference_only
from gradwire.kernels.sparse.entries import Entries, Parts
from gradwire.kernels.sparse.merge import merge, merge_unordered
from gradwire.kernels.sparse.partition import partition
from gradwire.kernels.sparse.permutation import Permutation
from gradwire_lab.kernels.hashing import HashMemory, hash_partition
from tests.each import each

MEMORIES = {
    "the paper's": HashMemory(),
    "one hash function": HashMemory(rehashes=1),
    "serial memory alone": HashMemory(rehashes=0, serial=2.0),
    "no serial memory": HashMemory(parallel=0.5, serial=0.0),
    "one cell a part": HashMemory(parallel=0.0, serial=0.0),
}


def entries_of(indices: list[int], width: int = 1) -> Entries:
    values = torch.arange(len(indices) * width, dtype=torch.float32)
    return Entries(torch.tensor(indices, dtype=torch.int32), values, width)


def as_sets(parts: Parts) -> list[list[tuple[float, ...]]]:
    found = []
    for rank in range(len(parts.counts_W)):
        own = parts.of(rank)
        units = own.values.view(-1, own.width).tolist()
        places = own.indices_K.tolist()
        found.append(sorted((p, *u) for p, u in zip(places, units, strict=True)))
    return found


@given(
    memory=st.sampled_from([*MEMORIES]),
    indices=st.lists(st.integers(0, 49), max_size=80),
    num_units=st.integers(50, 70),
    world=st.integers(1, 17),
    width=st.integers(1, 3),
    shuffled=st.booleans(),
)
def test_parts_have_the_entries_of_the_partition(
    memory: str,
    indices: list[int],
    num_units: int,
    world: int,
    width: int,
    shuffled: bool,
) -> None:
    entries = entries_of(indices, width)
    permutation = Permutation(num_units, seed=2) if shuffled else None
    given = (entries, num_units, world, permutation)
    found = hash_partition(*given, memory=MEMORIES[memory])
    want = partition(*given)
    assert found.parts.counts_W == want.counts_W
    assert as_sets(found.parts) == as_sets(want)
    with reference_only():
        reference = hash_partition(*given, memory=MEMORIES[memory])
    assert as_sets(reference.parts) == as_sets(want)


@each("threads", [1, 4])
def test_threads_lose_nothing_where_every_memory_overflows(threads: int) -> None:
    num_units = 300_000
    draw = torch.Generator().manual_seed(1)
    indices_K = torch.randperm(num_units, generator=draw)[:100_000].int()
    entries = Entries(indices_K, torch.randn(100_000, generator=draw))
    given = (entries, num_units, 8, Permutation(num_units, seed=1))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = hash_partition(*given, memory=HashMemory(parallel=0.5, serial=0.1))
    finally:
        torch.set_num_threads(before)
    assert found.serial == 8 * 625
    assert found.fallback > 40_000
    want = partition(*given)
    assert found.parts.counts_W == want.counts_W
    for rank in range(8):
        own = found.parts.of(rank)
        order_K = own.indices_K.argsort()
        assert torch.equal(own.indices_K[order_K], want.of(rank).indices_K)
        assert torch.equal(own.values[order_K], want.of(rank).values)


def test_the_memory_of_the_paper_needs_little_serial_and_no_fallback() -> None:
    """Of three tries into a table that ends half full: the integral of x^3, 3.1 %."""
    entries = entries_of(list(range(0, 60_000, 3)))
    found = hash_partition(entries, 60_000, 4, Permutation(60_000, seed=1))
    assert found.fallback == 0
    assert found.serial == pytest.approx(0.031 * entries.num, rel=0.3)


def test_an_index_outside_is_named() -> None:
    with pytest.raises(InvalidSetting, match=r"1 must lie in \[0, 10\), got 10"):
        hash_partition(entries_of([3, 10]), 10, 2)


@each("width", [1, 3])
def test_sums_of_unordered_places_have_the_bits_of_the_merge(width: int) -> None:
    draw = torch.Generator().manual_seed(4)
    ordered = []
    shuffled = []
    for count in (0, 40, 90):
        places_K = torch.randperm(100, generator=draw)[:count].int()
        units = torch.randn(count, width, generator=draw)
        shuffled.append(Entries(places_K, units.view(-1), width))
        order_K = places_K.argsort()
        own = units[order_K].reshape(-1)
        ordered.append(Entries(places_K[order_K].contiguous(), own, width))
    want = merge(ordered, 100, scale=0.3)
    found = merge_unordered(shuffled, 100, scale=0.3, dtype=torch.float32)
    assert torch.equal(found.indices_K, want.indices_K)
    assert torch.equal(found.values, want.values)
    with pytest.raises(InvalidSetting, match=r"must lie in \[0, 50\)"):
        merge_unordered(shuffled, 50, scale=0.3, dtype=torch.float32)
