"""ZEN's algorithm 1 launched on a GPU.

Source: ZEN (OSDI 2025), section 3.2, algorithm 1 with its four techniques.
Differences: h0 is the permutation, so parts are equally large (technique 3 asks for one
    that all ranks share). Cells are claimed by compare-and-swap: under the paper's
    read-after-write a thread that has seen a free cell may write after another has read
    its own entry back, which is then lost. A cell holds the entry's number and -1 marks
    an empty one. Where a part's serial memory is full, entries go to a list of their
    own and are put into their parts afterwards: ``Spill`` counts them. It needs a table
    of 2.2 cells an entry that has to be cleared before and read after, where the
    library's sort needs none.

Legend: K entries, W parts.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from gradwire.kernels.sparse.entries import Entries, Parts, part_length
from gradwire.kernels.sparse.partition import check_range
from gradwire.kernels.sparse.permutation import Permutation, places_on_gpu

BLOCK = 1024
"""Entries of a program."""

REHASHES = 3
"""The number of rehashes, k in algorithm 1."""


class Spill(NamedTuple):
    """The numbers of entries for which algorithm 1 found no cell in parallel memory."""

    serial: int
    """The number of entries in serial memory."""
    fallback: int
    """The number of entries for which serial memory was full too."""


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

    ``parallel`` and ``serial`` are the cells of all parts together, r1 and r2 in the
    paper: by default 2 K and a tenth of it.
    """
    check_range(entries, num_units)
    length = max(1, part_length(num_units, world))
    places_K = entries.indices_K
    if permutation is not None:
        places_K = torch.empty_like(places_K)
        places_on_gpu(entries.indices_K, permutation, places_K)
    r1 = max(1, -(-(2 * entries.num if parallel is None else parallel) // world))
    r2 = -(-r1 // 10) if serial is None else -(-serial // world)
    last = world * (r1 + r2)
    table = places_K.new_full((last + 1,), -1)
    counters = places_K.new_zeros(world + 1)
    spilled_K = torch.empty_like(places_K)
    _device().hash_entries[(max(1, -(-entries.num // BLOCK)),)](
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
        BLOCK=BLOCK,
    )
    cells = table[:last]
    order_K = cells[cells >= 0]
    *taken_W, fallback = counters.tolist()
    if fallback:
        order_K = torch.cat([order_K, spilled_K[:fallback]])
        order_K = order_K[(places_K[order_K.long()] // length).argsort(stable=True)]
    placed_K = places_K[order_K.long()]
    counts_W = (placed_K // length).bincount(minlength=world)
    units = entries.values.view(-1, entries.width)[order_K.long()].reshape(-1)
    parts = Parts(
        tuple(counts_W.tolist()), Entries(placed_K % length, units, entries.width)
    )
    return parts, Spill(sum(min(taken, r2) for taken in taken_W), fallback)


@cache
def _device() -> Any:
    """The kernel; importing it needs triton."""
    from . import hash_device

    return hash_device
