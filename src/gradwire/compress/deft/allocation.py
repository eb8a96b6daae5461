"""Who selects in which layer, as all ranks know it; the way of an index there and back.

The layers that a rank owns, one behind the other in the order in which they lie in the gradient,
are its part. A *place* counts the elements of all parts, rank 0's first: what a rank selects is a
range of places of its own, so an index relative to the part takes fewer bytes than one relative to
the gradient. Layers that are common to all ranks are in no part.

Legend: L layers in the order of the gradient, P those of parts in the order of places, K indices.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from ...contract import Member
from ...errors import RanksDiffer
from ...kernels.gather import lay_runs
from . import bin_packing
from .layer_partition import Partition


def owners(partition: Partition, k_L: Tensor, world: int, delegate: int) -> Tensor:
    """Algorithm 4: the rank that selects in each layer, int32; ``world`` where all ranks send all.

    Those are layers whose k is their size, as of one element. Rank r gets bin (delegate + r) mod W:
    the first bin has the largest layer, and is another rank's in each step.
    """
    bins = bin_packing.pack(bin_packing.work(partition.sizes_L, k_L), world)
    owners_L = (torch.tensor(bins, dtype=torch.int32, device="cpu") - delegate) % world
    return owners_L.where(k_L < partition.sizes_L, world).int()


class Allocation:
    """Each rank's layers and elements, as the layers' owners say; the same on every rank."""

    def __init__(self, partition: Partition, owners_L: Tensor, world: int) -> None:
        self.partition = partition
        num_layers = owners_L.bincount(minlength=world + 1).tolist()
        if len(num_layers) > world + 1:
            raise RanksDiffer(
                f"the delegate gives a layer to rank {len(num_layers) - 1} of {world}; give every "
                "rank the same model, compressor and settings"
            )
        *parts, self._common = torch.split(owners_L.argsort(stable=True), num_layers)
        self._layers = parts
        self._owned_P = torch.cat(parts)
        sizes_P = partition.sizes_L[self._owned_P]
        self._ends_P = sizes_P.cumsum(0)
        self._shifts_P = partition.starts_L[self._owned_P] - self._ends_P + sizes_P
        self.part_sizes = [int(partition.sizes_L[layers].sum()) for layers in parts]
        """Elements of each rank's part."""
        self.first_places = [0, *accumulate(self.part_sizes)][:-1]
        """The place of each part's first element."""

    @property
    def num_common(self) -> int:
        """Elements that all ranks send."""
        return int(self.partition.sizes_L[self._common].sum())

    def layers_of(self, rank: int) -> Tensor:
        """The layers that a rank selects in (int64), ascending."""
        layers: Tensor = self._layers[rank]
        return layers

    def firsts_of(self, rank: int) -> Tensor:
        """The place in a rank's part at which each of its layers begins (int64)."""
        sizes_P = self.partition.sizes_L[self._layers[rank]]
        return sizes_P.cumsum(0) - sizes_P

    def union(self, me: Member, places_K: Tensor) -> Tensor:
        """The support (int32, ascending): what lies at these places (int32, ascending), and all
        that is common.

        Raises ``RanksDiffer`` for places that this allocation cannot have.
        """
        before_P = torch.searchsorted(places_K, self._ends_P.int())
        counts_P = before_P.diff(prepend=before_P.new_zeros(1))
        if int(counts_P.sum()) != places_K.numel() or bool((counts_P < 0).any()):
            raise RanksDiffer(
                "ranks selected elements outside of their parts; give every rank the same model, "
                "compressor and settings"
            )
        counts_L = self.partition.sizes_L.clone()
        counts_L[self._owned_P] = counts_P
        tos_L = counts_L.cumsum(0) - counts_L
        total = places_K.numel() + self.num_common
        support_K = me.scratch("support", total, places_K, torch.int32, varies=True)
        lay_runs(places_K, counts_P, tos_L[self._owned_P], self._shifts_P, support_K)
        common, starts_L = self._common, self.partition.starts_L
        lay_runs(None, counts_L[common], tos_L[common], starts_L[common], support_K)
        return support_K
