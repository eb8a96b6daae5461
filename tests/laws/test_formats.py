"""Laws of permutations, partitions and every file of sparse/formats, and that they
bite.

Each law takes what is judged as arguments, so that wrong ones can be handed in.
Legend: K entries, W ranks, N elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.contract.payload import Payload
from gradwire.contract.registry import examples
from gradwire.kernels.libraries import reference_only
from gradwire.kernels.sparse.entries import Entries, Part, Parts, part_length, parts_of
from gradwire.kernels.sparse.format import SparseFormat
from gradwire.kernels.sparse.formats.coo import coo
from gradwire.kernels.sparse.formats.elias_fano import elias_fano
from gradwire.kernels.sparse.formats.hash_bitmap import hash_bitmap
from gradwire.kernels.sparse.merge import merge
from gradwire.kernels.sparse.partition import partition
from gradwire.kernels.sparse.permutation import Permutation
from gradwire_lab.laws.tolerance import same_bits
from papers.zen.bitmap import bitmap
from tests.each import each
from tests.kernels.vectors import num_threads
from tests.laws.test_laws_bite import rejected

# ---- laws ----------------------------------------------------------------------------

PUSH_CONSTANT, PULL_CONSTANT = 3.0, math.sqrt(6.0)
"""c of theorem 2's 1 + c sqrt(n ln n / K), with probability 1 - 1/n.

A part's load exceeds (1 + d) K / n with probability at most exp(-d^2 K / (3 n))
(Chernoff; for a permutation, which draws without replacement, Hoeffding 1963). Over the
n^2 loads of a push that is 1/n at d = sqrt(9 n ln n / K), over the n loads of a pull at
d = sqrt(6 n ln n / K).
"""


def balance_bound(num_entries: int, world: int, constant: float) -> float:
    """Theorem 2: the largest imbalance, where a part gets at least ln n entries or
    so.
    """
    return 1.0 + constant * math.sqrt(world * math.log(world) / num_entries)


def is_a_bijection(permutation: Any) -> None:
    """Every index has a place, which leads back to it: so no two share one."""
    every_N = torch.arange(permutation.numel, dtype=torch.int32)
    places_N = permutation.places(every_N)
    low, high = places_N.aminmax() if permutation.numel else (0, -1)
    inside = low >= 0 and high < permutation.numel
    assert inside, f"{permutation}: a place is outside"
    back_N = permutation.indices(places_N)
    assert torch.equal(back_N, every_N), (
        f"{permutation}: a place leads to another index"
    )


def is_balanced(
    permutation: Any, indices_K: Tensor, world: int, constant: float
) -> None:
    """No part gets more of these indices than theorem 2 allows (definition 8)."""
    places_K = permutation.places(indices_K)
    loads_W = (places_K // part_length(permutation.numel, world)).bincount(
        minlength=world
    )
    found = world * int(loads_W.max()) / indices_K.numel()
    bound = balance_bound(indices_K.numel(), world, constant)
    assert found <= bound, f"{permutation}: imbalance {found:.3f} is above {bound:.3f}"


def loses_nothing(
    partition: Callable[..., Any],
    entries: Entries,
    num_units: int,
    world: int,
    permutation: Any,
) -> None:
    """Each part has just the entries whose places are its own, ascending, with
    duplicates.
    """
    found = partition(entries, num_units, world, permutation)
    assert sum(found.counts_W) == entries.num, "entries were lost or made up"
    seen = []
    for rank in range(world):
        own, part = found.of(rank), Part(num_units, world, rank, permutation)
        inside = bool(((own.indices_K >= 0) & (own.indices_K < part.length)).all())
        assert inside, f"part {rank} has a place outside"
        ascends = bool((own.indices_K[1:] >= own.indices_K[:-1]).all())
        assert ascends, f"part {rank} does not ascend"
        seen.append(Entries(part.indices(own.indices_K), own.values, own.width))
    indices_K = torch.cat([one.indices_K for one in seen])
    units_Kw = torch.cat([one.values for one in seen]).view(-1, entries.width)
    # Entries of one index keep their order, so a stable sort by index restores the
    # list.
    order_K, wanted_K = (
        indices_K.argsort(stable=True),
        entries.indices_K.argsort(stable=True),
    )
    same = torch.equal(indices_K[order_K], entries.indices_K[wanted_K])
    assert same, "indices differ from those given"
    given_Kw = entries.values.view(-1, entries.width)[wanted_K]
    assert same_bits(units_Kw[order_K], given_Kw), "values differ from those given"


def dense_of(entries: Entries, num_units: int) -> Tensor:
    """The vector that entries without duplicates stand for."""
    units = entries.values.new_zeros(num_units, entries.width)
    units[entries.indices_K.long()] = entries.values.view(-1, entries.width)
    return units.reshape(-1)


def restores_the_vector(form: SparseFormat, entries: Entries, num_units: int) -> None:
    """Writing what was encoded over zeros gives the vector, bit for bit."""
    payload, want = form.encode(entries, num_units), dense_of(entries, num_units)
    out = torch.zeros_like(want)
    form.scatter(payload, Part(num_units), out, width=entries.width)
    assert same_bits(out, want), f"{form}: scatter gives another vector"


def restores_the_entries(form: SparseFormat, entries: Entries, num_units: int) -> None:
    """Indices and values come back, but for units that are all zeros where a format
    fills up.
    """
    found = form.decode(form.encode(entries, num_units), num_units, entries.width)
    again = dense_of(found, num_units)
    assert same_bits(again, dense_of(entries, num_units)), (
        f"{form}: decodes to another vector"
    )
    ascends = bool((found.indices_K[1:] > found.indices_K[:-1]).all())
    assert ascends, f"{form}: indices do not ascend"
    if type(form).__name__ in ("coo", "bitmap", "hash_bitmap", "elias_fano"):
        same = torch.equal(found.indices_K, entries.indices_K)
        assert same, f"{form}: decodes to other indices"


def has_the_stated_size(form: SparseFormat, entries: Entries, num_units: int) -> None:
    """The buffer's bytes are those of the formula."""
    payload, dtype = form.encode(entries, num_units), entries.values.dtype
    count = form.count(entries, num_units)
    stated = form.size_bytes(count, num_units, entries.width, dtype)
    assert payload.buffer is not None
    assert payload.buffer.numel() == stated, (
        f"{form}: {payload.buffer.numel()} bytes, not {stated}"
    )


FORMAT_LAWS = (restores_the_vector, restores_the_entries, has_the_stated_size)


# ---- deliberately wrong ones ---------------------------------------------------------


class collides(Permutation):
    """A hash: every index goes where chance puts it, as in the paper's strawman."""

    def places(self, indices_K: Tensor, out: Tensor | None = None) -> Tensor:
        draw = torch.Generator().manual_seed(self.seed)
        table_N = torch.randint(max(1, self.numel), (self.numel,), generator=draw)
        return table_N[indices_K.long()].int()


class leaves(Permutation):
    """One round without cycle walking: places beyond the last."""

    def places(self, indices_K: Tensor, out: Tensor | None = None) -> Tensor:
        return self._done(indices_K.long()).int()


class one_way(Permutation):
    """Its inverse belongs to another seed."""

    def indices(self, places_K: Tensor, out: Tensor | None = None) -> Tensor:
        return Permutation(self.numel, self.seed + 1).indices(places_K)


class stays(Permutation):
    """The identity: neighbours stay in one part."""

    def places(self, indices_K: Tensor, out: Tensor | None = None) -> Tensor:
        return indices_K


@dataclass(frozen=True)
class _Kept:
    """Entries of some positions only."""

    entries: Entries
    kept_K: Tensor

    def taken(self) -> Entries:
        indices_K, values, width = self.entries
        units_Kw = values.view(-1, width)[self.kept_K]
        return Entries(indices_K[self.kept_K], units_Kw.reshape(-1), width)


def drops_the_overflow(
    entries: Entries, num_units: int, world: int, permutation: Any
) -> Parts:
    """Algorithm 1 without a fallback: a part's memory is full after its even share and
    a tenth.
    """
    room = max(1, -(-11 * entries.num // (10 * world)))
    whole = partition(entries, num_units, world, permutation)
    starts = [sum(whole.counts_W[:rank]) for rank in range(world)]
    counts_W = tuple(min(count, room) for count in whole.counts_W)
    kept = [torch.arange(s, s + n) for s, n in zip(starts, counts_W, strict=True)]
    return Parts(counts_W, _Kept(whole.entries, torch.cat(kept)).taken())


def overwrites(entries: Entries, num_units: int, world: int, permutation: Any) -> Parts:
    """Counts are right, but two writers share a slot: the last entry is the first one
    again.
    """
    found = partition(entries, num_units, world, permutation)
    if entries.num > 1:
        found.entries.indices_K[-1] = found.entries.indices_K[0]
    return found


class loses_index_0(coo):
    """Takes index 0 for the mark of an empty slot."""

    def decode(
        self,
        payload: Payload,
        num_units: int,
        width: int = 1,
        *,
        room: Tensor | None = None,
    ) -> Entries:
        found = super().decode(payload, num_units, width, room=room)
        return _Kept(found, found.indices_K.nonzero().squeeze(1)).taken()


class loses_the_last(hash_bitmap):
    """Rounds the number of bytes down."""

    def decode(
        self,
        payload: Payload,
        num_units: int,
        width: int = 1,
        *,
        room: Tensor | None = None,
    ) -> Entries:
        found = super().decode(payload, num_units, width, room=room)
        kept_K = (found.indices_K < num_units // 8 * 8).nonzero().squeeze(1)
        return _Kept(found, kept_K).taken()


class forgets_the_bits(hash_bitmap):
    """States the size of its values alone."""

    def size_bytes(
        self,
        count: int,
        num_units: int,
        width: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> int:
        return count * width * dtype.itemsize


# ---- tests ---------------------------------------------------------------------------

FORMATS = (*examples("sparse.formats"), bitmap())
LARGE = (
    2**31 - 1,
    2**31 - 2,
    2**30 + 1,
    2**30,
    214_000_000,
    25_000_000,
    65_537,
    65_536,
)


def drawn_entries(
    kind: str, num_units: int, width: int, dtype: torch.dtype, seed: int
) -> Entries:
    """Ascending entries without duplicates; the same for the same arguments."""
    draw = torch.Generator().manual_seed(seed)
    every = torch.arange(num_units, dtype=torch.int32)
    chosen: dict[str, Tensor] = {
        "none": every[:0],
        "first": every[:1],
        "last": every[num_units - 1 :],
        "all": every,
        "both ends": torch.cat([every[:1], every[1:][num_units - 2 :]]),
        "some": every[torch.rand(num_units, generator=draw) < 0.1],
        "most": every[torch.rand(num_units, generator=draw) < 0.9],
        "a range": every[num_units // 3 : num_units // 2],
    }
    indices_K = chosen[kind].contiguous()
    values = torch.randn(
        indices_K.numel() * width, generator=draw, dtype=torch.float64
    ).to(dtype)
    values[::7], values[3::11] = -0.0, torch.inf
    return Entries(indices_K, values, width)


def adversarial(num_units: int, world: int, count: int) -> dict[str, Tensor]:
    """Sets of indices that an unlucky or careless hash does not spread."""
    draw = torch.Generator().manual_seed(count)
    fitting = num_units // count
    skewed = (torch.rand(8 * count, generator=draw) ** 6 * num_units).long().unique()
    indices = {
        "the first": torch.arange(count),
        "the last": torch.arange(num_units - count, num_units),
        "in one original part": torch.arange(count) + num_units // 2,
        "multiples of W": torch.arange(count) * world,
        "a stride of 2^k": torch.arange(count) * (1 << fitting.bit_length() - 1),
        "a large odd stride": torch.arange(count) * (fitting - 1 | 1),
        "runs of 16": torch.arange(count) // 16 * 16 * fitting
        + torch.arange(count) % 16,
        "skewed": skewed[
            torch.randperm(skewed.numel(), generator=draw)[:count].sort().values
        ],
    }
    return {name: found[found < num_units].int() for name, found in indices.items()}


# ---- the permutation -----------------------------------------------------------------


def test_every_size_to_5000_is_permuted() -> None:
    for numel in range(5_001):
        is_a_bijection(Permutation(numel, seed=numel % 7))


@each("numel", [1_000_003, 2**20, 2**20 + 1])
def test_large_sizes_are_permuted(numel: int) -> None:
    is_a_bijection(Permutation(numel, seed=numel))


@each("numel", [*range(1, 40), 1000, 4095, 4096, 4097, *LARGE])
def test_every_implementation_has_the_same_bits(numel: int) -> None:
    draw = torch.Generator().manual_seed(numel)
    some_K = torch.randint(numel, (777,), generator=draw, dtype=torch.int64).int()
    ends_K = torch.tensor([0, numel - 1, numel // 2], dtype=torch.int32)
    given_K = torch.cat([some_K, ends_K])
    shuffle = Permutation(numel, seed=3)
    places_K = shuffle.places(given_K)
    with reference_only():
        assert torch.equal(shuffle.places(given_K), places_K)
        assert torch.equal(shuffle.indices(places_K), given_K)
    assert torch.equal(shuffle.indices(places_K), given_K)
    assert torch.equal(shuffle.indices(places_K, out=places_K), given_K)


def test_seeds_give_different_permutations() -> None:
    every_N = torch.arange(1000, dtype=torch.int32)
    found = {
        tuple(Permutation(1000, seed).places(every_N).tolist()) for seed in range(50)
    }
    assert len(found) == 50


@each("num_units, world", [(2**20, 8), (2**20, 13), (1_000_003, 7)])
def test_adversarial_indices_are_balanced(num_units: int, world: int) -> None:
    for name, indices_K in adversarial(num_units, world, 20_000).items():
        for seed in range(5):
            shuffle = Permutation(num_units, seed)
            is_balanced(shuffle, indices_K, world, PUSH_CONSTANT)
        if name == "in one original part":
            with rejected(by=is_balanced):
                is_balanced(stays(num_units), indices_K, world, PUSH_CONSTANT)


@each("wrong", [collides, leaves, one_way])
def test_the_bijection_law_bites(wrong: Any) -> None:
    with rejected(by=is_a_bijection):
        is_a_bijection(wrong(1000, seed=1))


# ---- the partition and the merge -----------------------------------------------------

lists = st.tuples(
    st.sampled_from(["none", "first", "last", "all", "some", "most", "a range"]),
    st.sampled_from([1, 2, 3, 8, 17, 63, 64, 65, 1000, 20_011]),
    st.sampled_from([1, 1, 2, 5]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(0, 99),
)
WORLDS = st.sampled_from([1, 2, 3, 4, 7, 8, 16, 17])


def doubled(entries: Entries, seed: int) -> Entries:
    """Every entry about twice, in any order."""
    draw = torch.Generator().manual_seed(seed)
    at_K = torch.randint(max(1, entries.num), (2 * entries.num,), generator=draw)
    units = entries.values.view(-1, entries.width)[at_K]
    return Entries(entries.indices_K[at_K], units.reshape(-1), entries.width)


@settings(max_examples=60)
@example(
    drawn=("all", 1000, 1, torch.float32, 0), world=17, shuffled=True, duplicates=True
)
@given(drawn=lists, world=WORLDS, shuffled=st.booleans(), duplicates=st.booleans())
def test_a_partition_loses_nothing(
    drawn: tuple[str, int, int, torch.dtype, int],
    world: int,
    shuffled: bool,
    duplicates: bool,
) -> None:
    num_units, seed = drawn[1], drawn[4]
    entries = drawn_entries(*drawn)
    entries = doubled(entries, seed) if duplicates else entries
    shuffle = Permutation(num_units, seed) if shuffled else None
    loses_nothing(partition, entries, num_units, world, shuffle)
    found = partition(entries, num_units, world, shuffle)
    with reference_only():
        want = partition(entries, num_units, world, shuffle)
    assert found.counts_W == want.counts_W
    assert torch.equal(found.entries.indices_K, want.entries.indices_K)
    assert same_bits(found.entries.values, want.entries.values)


@each("wrong", [drops_the_overflow, overwrites])
def test_the_partition_law_bites(wrong: Any) -> None:
    entries = drawn_entries("a range", 20_011, 1, torch.float32, 1)
    with rejected(by=loses_nothing):
        loses_nothing(wrong, entries, 20_011, 8, None)


@settings(max_examples=40)
@given(drawn=lists, world=st.sampled_from([1, 2, 5]), shuffled=st.booleans())
def test_sums_are_those_of_the_ranks_in_order(
    drawn: tuple[str, int, int, torch.dtype, int], world: int, shuffled: bool
) -> None:
    drawn = (drawn[0], min(drawn[1], 67), *drawn[2:])  # the definition below is a loop
    _, num_units, width, _, seed = drawn
    dtype = torch.float64 if drawn[3] is torch.float64 else torch.float32
    ranks = [drawn_entries(*drawn[:3], dtype, seed + rank) for rank in range(world)]
    ranks[0] = doubled(ranks[0], seed)
    shuffle = Permutation(num_units, seed) if shuffled else None
    want = torch.zeros(num_units, width, dtype=dtype)
    touched = torch.zeros(num_units, dtype=torch.bool)
    placed = [partition(one, num_units, 1, shuffle).of(0) for one in ranks]
    for one in placed:
        for place, unit in zip(
            one.indices_K.tolist(), one.values.view(-1, width), strict=True
        ):
            want[place] += 0.3 * unit
            touched[place] = True
    most = sum(one.num for one in placed)
    dirty = (
        torch.full((most,), -7, dtype=torch.int32),
        torch.full((most * width,), math.nan),
    )
    room = (dirty[0], dirty[1].to(dtype))
    found = merge(placed, num_units, scale=0.3, room=room)
    assert torch.equal(found.indices_K, touched.nonzero().squeeze(1).int())
    assert same_bits(found.values, want[touched].reshape(-1))
    with reference_only():
        again = merge(placed, num_units, scale=0.3)
    assert torch.equal(found.indices_K, again.indices_K)
    assert same_bits(found.values, again.values)


def test_the_number_of_threads_changes_no_bit() -> None:
    num_units, world = 3_000_017, 3
    shuffle, found = Permutation(num_units, 1), []
    indices_K = Permutation(num_units, 2).indices(
        torch.arange(400_000, dtype=torch.int32)
    )
    entries = Entries(
        indices_K, torch.randn(400_000, generator=torch.Generator().manual_seed(1))
    )
    parts = parts_of(num_units, world, shuffle)
    for threads in (1, 2, 3):
        with num_threads(threads):
            split = partition(entries, num_units, world, shuffle)
            out_N, pulled = torch.zeros(num_units), []
            for part in parts:
                sums = merge([split.of(part.rank)] * 2, part.length)
                pulled += [
                    form.encode(sums, part.length)
                    for form in (hash_bitmap(), elias_fano())
                ]
                for payload, form in zip(
                    pulled[-2:], (hash_bitmap(), elias_fano()), strict=True
                ):
                    form.scatter(payload, part, out_N, scale=0.5)
            found.append(
                [out_N, *split.entries[:2], *[payload.buffer for payload in pulled]]
            )
    assert torch.equal(out_N[indices_K.long()], entries.values)
    assert int(out_N.count_nonzero()) == 400_000
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# ---- the formats ---------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS, ids=repr)
@settings(max_examples=40)
@example(drawn=("both ends", 2, 1, torch.float64, 0))
@example(drawn=("first", 1, 1, torch.float64, 0))
@example(drawn=("all", 65, 5, torch.float32, 0))
@example(drawn=("none", 0, 1, torch.float32, 0))
@example(drawn=("both ends", 20_011, 1, torch.float32, 0))
@given(drawn=lists)
def test_every_format_keeps_every_law(
    form: Any, drawn: tuple[str, int, int, torch.dtype, int]
) -> None:
    if drawn[1] == 20_011 and drawn[2] > 1:
        return
    entries, num_units = drawn_entries(*drawn), drawn[1]
    for law in FORMAT_LAWS:
        law(form, entries, num_units)
    payload = form.encode(entries, num_units)
    with reference_only():
        assert torch.equal(form.encode(entries, num_units).buffer, payload.buffer)
        for law in FORMAT_LAWS:
            law(form, entries, num_units)


@each(
    "law, form",
    [
        (restores_the_vector, loses_index_0()),
        (restores_the_entries, loses_the_last()),
        (has_the_stated_size, forgets_the_bits()),
    ],
    ids=lambda one: getattr(one, "__name__", type(one).__name__),
)
def test_a_format_law_bites(law: Any, form: Any) -> None:
    with rejected(by=law):
        law(form, drawn_entries("both ends", 1003, 1, torch.float32, 1), 1003)
    with rejected(by=law):
        law(form, drawn_entries("most", 1003, 1, torch.float32, 1), 1003)


@settings(max_examples=40)
@given(
    drawn=lists, world=WORLDS, shuffled=st.booleans(), scale=st.sampled_from([1.0, 0.3])
)
def test_parts_of_all_ranks_make_the_vector(
    drawn: tuple[str, int, int, torch.dtype, int],
    world: int,
    shuffled: bool,
    scale: float,
) -> None:
    kind, num_units, width, dtype, seed = drawn
    dtype = torch.float64 if dtype is torch.float64 else torch.float32
    entries = drawn_entries(kind, num_units, width, dtype, seed)
    want = dense_of(entries, num_units) * scale
    short = want[
        : want.numel() - (width - 1)
    ].clone()  # the last unit reaches beyond the vector
    parts = parts_of(
        num_units, world, Permutation(num_units, seed) if shuffled else None
    )
    found = partition(entries, num_units, world, parts[0].permutation)
    for form in (hash_bitmap(), elias_fano()):
        out = torch.zeros_like(short)
        for part in parts:
            payload = form.encode(found.of(part.rank), part.length)
            form.scatter(payload, part, out, scale=scale, width=width)
        assert torch.equal(out, short)
