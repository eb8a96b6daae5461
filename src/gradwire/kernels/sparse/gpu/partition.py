"""The partition launched on a GPU, both ways: two passes, and ZEN's algorithm 1.

Source: ZEN (OSDI 2025), section 3.2, algorithm 1 with its four techniques.
Differences: h0 is the permutation, so parts are equally large (technique 3 asks for one that all
    ranks share). Cells are claimed by compare-and-swap: under the paper's read-after-write a thread
    that has seen a free cell may write after another has read its own entry back, which is then
    lost. A cell holds the entry's number and -1 marks an empty one. Where a part's serial memory is
    full, entries go to a list of their own and are put into their parts afterwards: ``Spill``
    counts them.

``two_passes`` needs no table: histogram, scan, scatter. It is what ``sparse.partition`` takes on a
GPU: it is lossless by construction, keeps the order of the list and needs 16 bytes an entry, where
algorithm 1 needs a table of 2.2 cells an entry that has to be cleared before and read after.

Legend: K entries, W parts.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..entries import Entries, Parts, out_of_range, part_length
from ..permutation import Permutation

REHASHES = 3
"""The number of rehashes, k in algorithm 1."""
_PROGRAM = 8192  # entries times parts of a program of the two passes
_BLOCK = 1024


class Spill(NamedTuple):
    """The numbers of entries for which algorithm 1 found no cell in parallel memory."""

    serial: int
    """The number of entries in serial memory."""
    fallback: int
    """The number of entries for which serial memory was full too."""


def two_passes(
    entries: Entries, num_units: int, world: int, permutation: Permutation | None
) -> Parts:
    """``sparse.partition``, with the entries of a part in the order of the list."""
    _check_range(entries, num_units)
    device, length = _device(), max(1, part_length(num_units, world))
    places_K = _places(device, entries.indices_K, permutation)
    bins = max(2, 1 << (world - 1).bit_length())
    block = max(16, _PROGRAM // bins)
    num_blocks = max(1, -(-entries.num // block))
    counts = places_K.new_zeros(bins * num_blocks)
    local_K, order_K = torch.empty_like(places_K), torch.empty_like(places_K)
    shape = {"WORLD": bins, "BLOCK": block}
    sizes = (entries.num, num_blocks, length)
    device.count[(num_blocks,)](places_K, counts, *sizes, **shape)
    starts = (counts.cumsum(0) - counts).int()
    device.move[(num_blocks,)](places_K, starts, local_K, order_K, *sizes, **shape)
    counts_W = counts.view(bins, num_blocks).sum(1)[:world]
    return Parts(tuple(counts_W.tolist()), _taken(entries, local_K, order_K))


def algorithm_1(
    entries: Entries,
    num_units: int,
    world: int,
    permutation: Permutation | None,
    *,
    rehashes: int = REHASHES,
    parallel: int | None = None,
    serial: int | None = None,
) -> tuple[Parts, Spill]:
    """``sparse.partition`` with a hash table; the entries of a part are in any order.

    ``parallel`` and ``serial`` are the cells of all parts together, r1 and r2 in the paper: by
    default 2 K and a tenth of it.
    """
    _check_range(entries, num_units)
    device, length = _device(), max(1, part_length(num_units, world))
    places_K = _places(device, entries.indices_K, permutation)
    r1 = max(1, -(-(2 * entries.num if parallel is None else parallel) // world))
    r2 = -(-r1 // 10) if serial is None else -(-serial // world)
    last = world * (r1 + r2)
    table = places_K.new_full((last + 1,), -1)
    counters, spilled_K = places_K.new_zeros(world + 1), torch.empty_like(places_K)
    device.hash_entries[(max(1, -(-entries.num // _BLOCK)),)](
        entries.indices_K,
        places_K,
        table,
        counters,
        spilled_K,
        entries.num,
        length,
        r1,
        r2,
        last,
        REHASHES=rehashes,
        BLOCK=_BLOCK,
    )
    cells = table[:last]
    order_K = cells[cells >= 0]
    *taken_W, fallback = counters.tolist()
    if fallback:
        order_K = torch.cat([order_K, spilled_K[:fallback]])
        order_K = order_K[(places_K[order_K.long()] // length).argsort(stable=True)]
    placed_K = places_K[order_K.long()]
    counts_W = (placed_K // length).bincount(minlength=world)
    parts = Parts(tuple(counts_W.tolist()), _taken(entries, placed_K % length, order_K))
    return parts, Spill(sum(min(taken, r2) for taken in taken_W), fallback)


def places(indices_K: Tensor, permutation: Permutation) -> Tensor:
    """``permutation.places`` of indices in range."""
    return _places(_device(), indices_K, permutation)


def _places(device: Any, indices_K: Tensor, permutation: Permutation | None) -> Tensor:
    if permutation is None or indices_K.numel() == 0:
        return indices_K
    words = torch.tensor(list(permutation.constants), dtype=torch.int64)
    constants = words.to(torch.int32).to(indices_K.device)
    found_K = torch.empty_like(indices_K)
    blocks = -(-indices_K.numel() // _BLOCK)
    device.permute[(blocks,)](indices_K, constants, found_K, indices_K.numel(), BLOCK=_BLOCK)
    return found_K


def _check_range(entries: Entries, num_units: int) -> None:
    outside_K = (entries.indices_K < 0) | (entries.indices_K >= num_units)
    if bool(outside_K.any()):
        bad = int(outside_K.nonzero()[0])
        raise out_of_range(bad, int(entries.indices_K[bad]), num_units)


def _taken(entries: Entries, local_K: Tensor, order_K: Tensor) -> Entries:
    units = entries.values.view(-1, entries.width)[order_K.long()]
    return Entries(local_K, units.reshape(-1), entries.width)


@cache
def _device() -> Any:
    """The kernels; importing them needs triton."""
    from . import device

    return device
