"""Sparse parameter server that broadcasts sums: a rival in ZEN's theorem 1.

Source: ZEN (Wang et al., OSDI 2025), appendix B.1, "Sparse PS with broadcast".
Differences: the W broadcasts go at once, so that their bytes share all links; the paper
    counts them one after another. Each is a binomial tree, which is the verb's
    (``travel``). Entries are merged in rank order.
Wire: see ``push_pull`` for the push and what is announced; then rank r sends, with
    PULL(k) = COO(k), sum over the servers s of c((r - s) mod W) * PULL(units merged at
    s) where c(p) is how many ranks the p-th rank from the root on passes a broadcast on
    to: ceil(log2 W) from the root itself, 0 from at least half of the ranks. No sum is
    padded, and that of the fullest range leaves its server ceil(log2 W) times, not W -
    1. On 8 hosts at 200 Mbit, 4 M elements of which each rank has 1 %, it took 341 ms
    where ``sparse_ps`` took 364 and ``zen`` 99 (like an LSTM's, imbalance 6.8), but 191
    ms to 136 where parts were even.
State: the codec's.
Contributed: the encoded gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.collective.steps.ordered_sums import split
from gradwire.collective.steps.push_pull import Delivery, PushPull
from gradwire.collective.steps.travel import bytes_sent
from gradwire.contract import Member
from gradwire.contract.collective import Dimensions
from gradwire.contract.verbs import Broadcast


def broadcast_bytes(sizes: Sequence[int], rank: int) -> int:
    """Bytes that a rank sends where each broadcasts a sum of so many bytes.

    >>> [broadcast_bytes([0, 10, 0, 0], rank) for rank in range(4)]
    [0, 20, 10, 0]
    """
    world = len(sizes)
    each = enumerate(sizes)
    return sum(
        bytes_sent("broadcast", size, world, (rank - root) % world)
        for root, size in each
    )


@dataclass(frozen=True, kw_only=True)
class sparse_ps_broadcast(PushPull):
    """Push to the rank that serves an index's range, merge, broadcast."""

    dimensions: ClassVar[Dimensions] = Dimensions(
        "point-to-point", "incremental", "parallelism", "imbalanced"
    )

    def delivery(self, me: Member, sizes: Sequence[int], like: Tensor) -> Delivery:
        whole = me.scratch("arrived", sum(sizes), like, torch.uint8, varies=True)
        slots = split(whole, sizes)
        verbs = tuple(Broadcast(root, slot) for root, slot in enumerate(slots))
        return Delivery(slots[me.rank], slots, verbs)


EXAMPLES = (sparse_ps_broadcast(),)
