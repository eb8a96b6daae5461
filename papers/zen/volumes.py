"""The bytes of every scheme on the busiest link, counted from the index sets of all
ranks.

They are counted as in section 2.4 of ZEN: bytes over a rate, full duplex, no latency
and no computation; a value and an index are 4 bytes each. Index sets are counted, not
mean densities, so skew and overlaps are those of the ranks at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.kernels.sparse.entries import num_units, part_length
from gradwire.kernels.sparse.permutation import Permutation
from gradwire.planning.data.sparsity import BLOCK
from gradwire_lab.collective.sparse_ps_broadcast import broadcast_bytes

from .captures import Capture

INDEX_BYTES = VALUE_BYTES = 4
ENTRY_BYTES = INDEX_BYTES + VALUE_BYTES

Places = Callable[[Tensor], Tensor]
"""A bijection of [0, numel) that gives the place of each index, int32 to int32."""


def union(sets: Sequence[Tensor], numel: int) -> Tensor:
    """Ascending indices that are in any of the sets, int32."""
    there_N = torch.zeros(numel, dtype=torch.bool)
    for indices_K in sets:
        there_N[indices_K.long()] = True
    return there_N.nonzero()[:, 0].int()


def grown(sets: Sequence[Tensor], numel: int) -> list[list[int]]:
    """The sizes of unions by doubling: entry s has those of every 2^s neighbouring
    ranks.

    Only whole groups are counted: 6 sets give 6, 3 and 1 sizes.
    """
    sizes = []
    level = list(sets)
    while level:
        sizes.append([one.numel() for one in level])
        pairs = zip(level[::2], level[1::2], strict=False)
        level = [union(pair, numel) for pair in pairs]
    return sizes


@dataclass(frozen=True)
class Traffic:
    """The numbers of entries in a push and a pull among W ranks that are servers as
    well.
    """

    pushed_WW: Tensor
    """The number of entries that each worker pushes to each server."""
    pulled_W: Tensor
    """The number of entries that each server sends to every worker."""

    @classmethod
    def of(
        cls, sets: Sequence[Tensor], numel: int, places: Places | None = None
    ) -> Traffic:
        """The traffic of these sets; parts are ranges of ceil(numel / W) indices, or of
        places.
        """
        world = len(sets)
        part_numel = part_length(numel, world)

        def by_part(indices_K: Tensor) -> Tensor:
            at_K = indices_K if places is None else places(indices_K)
            return torch.bincount(at_K.long() // part_numel, minlength=world)

        return cls(
            torch.stack([by_part(one) for one in sets]), by_part(union(sets, numel))
        )

    def push_bytes(self, entry_bytes: int) -> int:
        """The bytes in the busiest direction of a link; a rank's own entries are not
        sent.
        """
        sent_WW = self.pushed_WW - torch.diag(self.pushed_WW.diag())
        return entry_bytes * int(max(sent_WW.sum(0).max(), sent_WW.sum(1).max()))

    def pull_bytes(self, entry_bytes: int, fixed_bytes: int = 0) -> int:
        """The bytes in the busiest direction; each message has ``fixed_bytes`` beside
        entries.
        """
        size_W = self.pulled_W * entry_bytes + fixed_bytes
        others = len(size_W) - 1
        return int(max(others * size_W.max(), size_W.sum() - size_W.min()))

    def broadcast_bytes(self, entry_bytes: int) -> int:
        """The bytes in the busiest direction if the sums are broadcast, all at once."""
        size_W: list[int] = (self.pulled_W * entry_bytes).tolist()
        sent = max(broadcast_bytes(size_W, rank) for rank in range(len(size_W)))
        return max(sent, sum(size_W) - min(size_W))

    def in_turn_bytes(self, entry_bytes: int) -> float:
        """The bytes that pass one after another if the sums are broadcast in turn.

        Appendix B.1: each as a scatter and an all-gather, which is the least that it
            knows of.
        """
        world = len(self.pulled_W)
        return 2 * (world - 1) / world * entry_bytes * int(self.pulled_W.sum())

    @property
    def push_imbalance(self) -> float:
        """Definition 8: the largest part of any rank's indices over an equal one."""
        own_W = self.pushed_WW.sum(1).clamp(min=1)
        return float((len(own_W) * self.pushed_WW.max(1).values / own_W).max())

    @property
    def pull_imbalance(self) -> float:
        """Definition 8: the largest part of the union over an equal one."""
        total = max(1, int(self.pulled_W.sum()))
        return len(self.pulled_W) * int(self.pulled_W.max()) / total


def busiest_bytes(
    sets: Sequence[Tensor], numel: int, places: Places, sizes: Sequence[Sequence[int]]
) -> dict[str, float]:
    """The bytes in the busiest direction of a link, by scheme; ``sizes`` is
    ``grown(sets)``.
    """
    world = len(sets)
    ranged = Traffic.of(sets, numel)
    hashed = Traffic.of(sets, numel, places)
    blocked = Traffic.of([blocks(one) for one in sets], num_units(numel, BLOCK))
    part_bitmap_bytes = num_units(part_length(numel, world), 8)
    own = [one.numel() for one in sets]

    pull_coo = hashed.pull_bytes(ENTRY_BYTES)
    pull_bitmap = hashed.pull_bytes(VALUE_BYTES, part_bitmap_bytes)
    return {
        "allreduce": dense_bytes(numel, world),
        "agsparse": ENTRY_BYTES * (sum(own) - min(own)),
        "sparcml": sparcml_bytes(sizes, world),
        "omnireduce": _both(blocked, VALUE_BYTES * BLOCK),
        "sparse_ps": _both(ranged, ENTRY_BYTES),
        "broadcast_in_turn": ranged.push_bytes(ENTRY_BYTES)
        + ranged.in_turn_bytes(ENTRY_BYTES),
        "sparse_ps_broadcast": ranged.push_bytes(ENTRY_BYTES)
        + ranged.broadcast_bytes(ENTRY_BYTES),
        "balanced": _both(hashed, ENTRY_BYTES),
        "zen": hashed.push_bytes(ENTRY_BYTES) + min(pull_coo, pull_bitmap),
        "without_index": _both(hashed, VALUE_BYTES),
    }


def rows_bytes(found: Capture, num_ranks: int) -> float:
    """The bytes of Balanced Parallelism with whole units (rows of an embedding) as
    entries.

    Each unit has one index. Entries are pushed in COO and pulled in the smaller one of
    COO and a hash bitmap.
    """
    sets = [torch.from_numpy(one) for one in found.units[:num_ranks]]
    traffic = Traffic.of(sets, found.num_units, Permutation(found.num_units).places)
    row_bytes = VALUE_BYTES * found.width
    bits = num_units(part_length(found.num_units, num_ranks), 8)
    pulls = (
        traffic.pull_bytes(INDEX_BYTES + row_bytes),
        traffic.pull_bytes(row_bytes, bits),
    )
    return traffic.push_bytes(INDEX_BYTES + row_bytes) + min(pulls)


def _both(traffic: Traffic, entry_bytes: int) -> int:
    return traffic.push_bytes(entry_bytes) + traffic.pull_bytes(entry_bytes)


def dense_bytes(numel: int, world: int) -> float:
    """The bytes that a rank sends in a ring all-reduce of float32."""
    return 2 * (world - 1) / world * VALUE_BYTES * numel


def sparcml_bytes(sizes: Sequence[Sequence[int]], world: int) -> int:
    """The bytes of recursive doubling in COO among a power of two ranks.

    Ranks wait for their partners, so a stage of two groups of ranks lasts as long as
    the larger union needs.
    """
    done = [0] * world
    stage = 0
    while len(done) > 1:
        own = sizes[stage]
        done = [
            max(done[i], done[i + 1]) + ENTRY_BYTES * max(own[i], own[i + 1])
            for i in range(0, len(done), 2)
        ]
        stage += 1
    return done[0]


def blocks(indices_K: Tensor) -> Tensor:
    """The ascending numbers of the blocks that ascending indices lie in, int32."""
    found: Tensor = torch.unique_consecutive(indices_K // BLOCK)
    return found
