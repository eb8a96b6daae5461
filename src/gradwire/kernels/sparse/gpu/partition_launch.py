"""The partition launched on a GPU, in two passes: histogram, scan, scatter.

It is lossless by construction, keeps the order of the list and needs 16 bytes an entry. ZEN's own
way, algorithm 1 with its hash table, is ``gradwire_lab/hashing``.

Source: ZEN (OSDI 2025), section 3.2.
Differences: h0 is the permutation, so parts are equally large (technique 3 asks for one that all
    ranks share).

Legend: K entries, W parts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..entries import Entries, Parts, out_of_range, part_length
from ..permutation import Permutation

_PROGRAM = 8192  # entries times parts of a program of the two passes
BLOCK = 1024


def two_passes(
    entries: Entries, num_units: int, world: int, permutation: Permutation | None
) -> Parts:
    """``sparse.partition``, with the entries of a part in the order of the list."""
    check_range(entries, num_units)
    device, length = _device(), max(1, part_length(num_units, world))
    places_K = places(entries.indices_K, permutation)
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
    return Parts(tuple(counts_W.tolist()), taken(entries, local_K, order_K))


def places(indices_K: Tensor, permutation: Permutation | None) -> Tensor:
    """``permutation.places`` of indices in range; without one they are their own places."""
    if permutation is None or indices_K.numel() == 0:
        return indices_K
    words = torch.tensor(list(permutation.constants), dtype=torch.int64)
    constants = words.to(torch.int32).to(indices_K.device)
    found_K = torch.empty_like(indices_K)
    blocks = -(-indices_K.numel() // BLOCK)
    _device().permute[(blocks,)](indices_K, constants, found_K, indices_K.numel(), BLOCK=BLOCK)
    return found_K


def check_range(entries: Entries, num_units: int) -> None:
    """Raises InvalidSetting where an index is not in [0, ``num_units``)."""
    outside_K = (entries.indices_K < 0) | (entries.indices_K >= num_units)
    if bool(outside_K.any()):
        bad = int(outside_K.nonzero()[0])
        raise out_of_range(bad, int(entries.indices_K[bad]), num_units)


def taken(entries: Entries, local_K: Tensor, order_K: Tensor) -> Entries:
    """Entries in another order, at their local places."""
    units = entries.values.view(-1, entries.width)[order_K.long()]
    return Entries(local_K, units.reshape(-1), entries.width)


@cache
def _device() -> Any:
    """The kernels; importing them needs triton."""
    from . import partition_device as device

    return device
