"""Deliberately wrong permutations, partitions and sparse formats, one for each law."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.contract.payload import Payload
from gradwire.kernels.sparse.entries import Entries, Parts
from gradwire.kernels.sparse.formats.coo import coo
from gradwire.kernels.sparse.formats.hash_bitmap import hash_bitmap
from gradwire.kernels.sparse.partition import partition
from gradwire.kernels.sparse.permutation import Permutation


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


def drops_the_overflow(entries: Entries, num_units: int, world: int, permutation: Any) -> Parts:
    """Algorithm 1 without a fallback: a part's memory is full after its even share and a tenth."""
    room = max(1, -(-11 * entries.num // (10 * world)))
    whole = partition(entries, num_units, world, permutation)
    starts = [sum(whole.counts_W[:rank]) for rank in range(world)]
    counts_W = tuple(min(count, room) for count in whole.counts_W)
    kept = [torch.arange(s, s + n) for s, n in zip(starts, counts_W, strict=True)]
    return Parts(counts_W, _Kept(whole.entries, torch.cat(kept)).taken())


def overwrites(entries: Entries, num_units: int, world: int, permutation: Any) -> Parts:
    """Counts are right, but two writers share a slot: the last entry is the first one again."""
    found = partition(entries, num_units, world, permutation)
    if entries.num > 1:
        found.entries.indices_K[-1] = found.entries.indices_K[0]
    return found


class loses_index_0(coo):
    """Takes index 0 for the mark of an empty slot."""

    def decode(
        self, payload: Payload, num_units: int, width: int = 1, *, room: Tensor | None = None
    ) -> Entries:
        found = super().decode(payload, num_units, width, room=room)
        return _Kept(found, found.indices_K.nonzero().squeeze(1)).taken()


class loses_the_last(hash_bitmap):
    """Rounds the number of bytes down."""

    def decode(
        self, payload: Payload, num_units: int, width: int = 1, *, room: Tensor | None = None
    ) -> Entries:
        found = super().decode(payload, num_units, width, room=room)
        kept_K = (found.indices_K < num_units // 8 * 8).nonzero().squeeze(1)
        return _Kept(found, kept_K).taken()


class forgets_the_bits(hash_bitmap):
    """States the size of its values alone."""

    def size_bytes(
        self, count: int, num_units: int, width: int = 1, dtype: torch.dtype = torch.float32
    ) -> int:
        return count * width * dtype.itemsize
