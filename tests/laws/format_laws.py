"""What holds for every permutation, partition and sparse format.

Each law takes what is judged as arguments, so that wrong ones can be handed in.
Legend: K entries, W ranks, N elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.kernels.sparse.entries import Entries, Part, part_length
from gradwire.kernels.sparse.format import SparseFormat
from gradwire_lab.laws.tolerance import same_bits

PUSH_CONSTANT, PULL_CONSTANT = 3.0, math.sqrt(6.0)
"""c of theorem 2's 1 + c sqrt(n ln n / K), with probability 1 - 1/n.

A part's load exceeds (1 + d) K / n with probability at most exp(-d^2 K / (3 n)) (Chernoff; for a
permutation, which draws without replacement, Hoeffding 1963). Over the n^2 loads of a push that is
1/n at d = sqrt(9 n ln n / K), over the n loads of a pull at d = sqrt(6 n ln n / K).
"""


def balance_bound(num_entries: int, world: int, constant: float) -> float:
    """Theorem 2: the largest imbalance, where a part gets at least ln n entries or so."""
    return 1.0 + constant * math.sqrt(world * math.log(world) / num_entries)


def is_a_bijection(permutation: Any) -> None:
    """Every index has a place, which leads back to it: so no two share one."""
    every_N = torch.arange(permutation.numel, dtype=torch.int32)
    places_N = permutation.places(every_N)
    low, high = places_N.aminmax() if permutation.numel else (0, -1)
    inside = low >= 0 and high < permutation.numel
    assert inside, f"{permutation}: a place is outside"
    back_N = permutation.indices(places_N)
    assert torch.equal(back_N, every_N), f"{permutation}: a place leads to another index"


def is_balanced(permutation: Any, indices_K: Tensor, world: int, constant: float) -> None:
    """No part gets more of these indices than theorem 2 allows (definition 8)."""
    places_K = permutation.places(indices_K)
    loads_W = (places_K // part_length(permutation.numel, world)).bincount(minlength=world)
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
    """Each part has just the entries whose places are its own, ascending, with duplicates."""
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
    # Entries of one index keep their order, so a stable sort by index restores the list.
    order_K, wanted_K = indices_K.argsort(stable=True), entries.indices_K.argsort(stable=True)
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
    """Indices and values come back, but for units that are all zeros where a format fills up."""
    found = form.decode(form.encode(entries, num_units), num_units, entries.width)
    again = dense_of(found, num_units)
    assert same_bits(again, dense_of(entries, num_units)), f"{form}: decodes to another vector"
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
    assert payload.buffer.numel() == stated, f"{form}: {payload.buffer.numel()} bytes, not {stated}"


FORMAT_LAWS = (restores_the_vector, restores_the_entries, has_the_stated_size)
