"""Regions: the ranges of a gradient that ranks sum up, cut so that each gets as many
elements.

Source: Ok-Topk (PPoPP 2022), section 3.1.1, balanced split and reduce: each rank cuts
    the elements that it selected into W equal parts, and the regions' borders are the
    means of its cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gradwire.contract.payload import Format
from gradwire.errors import RanksDiffer
from gradwire.kernels.sparse.choose import Formats, smallest
from gradwire.kernels.sparse.entries import Entries
from gradwire.kernels.sparse.format import SparseFormat


@dataclass(frozen=True)
class Regions:
    """The borders of W regions, ascending from 0 to the gradient's length; some may be
    empty.
    """

    edges: tuple[int, ...]
    among: Formats

    @classmethod
    def of(cls, cuts_C: Tensor, numel: int, among: Formats) -> Regions:
        """The regions between these inner borders; raises ``RanksDiffer`` unless they
        ascend.
        """
        edges = (0, *cuts_C.tolist(), numel)
        if any(stop < start for start, stop in pairwise(edges)):
            raise RanksDiffer(
                f"regions of {numel} elements have the borders {edges}, and they must "
                "ascend; give every rank the same model, compressor and settings"
            )
        return cls(edges, among)

    def length(self, rank: int) -> int:
        """The number of elements in a rank's region."""
        return self.edges[rank + 1] - self.edges[rank]

    def form(
        self, rank: int, count: int, dtype: torch.dtype
    ) -> tuple[SparseFormat, Format]:
        """How so many elements of a rank's region are written, and the layout."""
        form = smallest(self.among, count, self.length(rank), 1, dtype)
        return form, form.layout(count, self.length(rank), 1, dtype)

    def shares(self, count: int) -> list[int]:
        """So many elements spread evenly over the gradient, by region."""
        numel = max(1, self.edges[-1])
        places = [count * edge // numel for edge in self.edges]
        return [stop - start for start, stop in pairwise(places)]

    def parts(self, entries: Entries) -> list[Entries]:
        """Ascending entries of the whole gradient by region, with places relative to
        it.
        """
        indices_K, values_K, _ = entries
        cuts_C = torch.tensor(self.edges[1:-1], dtype=torch.int32)
        stops = [*torch.searchsorted(indices_K, cuts_C).tolist(), entries.num]
        bounds = []
        start = 0
        for first, stop in zip(self.edges, stops, strict=False):
            bounds.append(Entries(indices_K[start:stop] - first, values_K[start:stop]))
            start = stop
        return bounds


def even_cuts(numel: int, world: int) -> Tensor:
    """The inner borders of regions of equal length (int64)."""
    cuts = [numel * rank // world for rank in range(1, world)]
    return torch.tensor(cuts, dtype=torch.int64, device="cpu")


def write_cuts(indices_K: Tensor, numel: int, cuts_C: Tensor) -> None:
    """Fills ``cuts_C`` with the inner borders that cut these ascending indices into
    equal parts.
    """
    count = indices_K.numel()
    world = cuts_C.numel() + 1
    if count:
        at_C = torch.tensor([count * rank // world for rank in range(1, world)])
        cuts_C.copy_(indices_K[at_C])
    else:
        cuts_C.copy_(even_cuts(numel, world))


def slots_of(regions: Regions, counts: Sequence[int], dtype: torch.dtype) -> list[int]:
    """Bytes of the room for so many elements of each region."""
    return [regions.form(rank, k, dtype)[1].slot_bytes for rank, k in enumerate(counts)]
