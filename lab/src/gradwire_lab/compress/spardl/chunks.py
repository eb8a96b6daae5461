"""The chunks of a gradient, the rounds in which they travel, and room for their
payloads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from gradwire.collective.steps.ordered_sums import Packed, decoded
from gradwire.compress._coo import share_of
from gradwire.contract import Member
from gradwire.contract.payload import Format, Payload
from gradwire.contract.spec import chunk_bounds, working_dtype
from gradwire.kernels.sparse.choose import Formats, smallest
from gradwire.kernels.sparse.entries import Entries
from gradwire.kernels.sparse.format import SparseFormat


@lru_cache(maxsize=256)
def rounds(world: int) -> tuple[tuple[int, int], ...]:
    """The rounds of Spar-Reduce-Scatter: (distance of the rank that is sent to, number
    of chunks).

    Bruck's all-gather has the same rounds, the last one first.

    >>> rounds(6), rounds(8)
    (((4, 2), (2, 2), (1, 1)), ((4, 4), (2, 2), (1, 1)))
    """
    distances = [1 << i for i in reversed(range((world - 1).bit_length()))]
    return tuple(
        (g, world - g if place == 0 else g) for place, g in enumerate(distances)
    )


@dataclass(frozen=True)
class Chunked:
    """A gradient cut into as many ranges as a team has ranks, of which each rank sums
    up one.
    """

    bounds: tuple[tuple[int, int], ...]
    counts: tuple[int, ...]
    """How many elements of each chunk are sent: at least 1, but of an empty one
    none.
    """
    dtype: torch.dtype
    """The gradient's, in which means travel."""
    among: Formats

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which sums travel."""
        return working_dtype(self.dtype)

    def length(self, chunk: int) -> int:
        """The number of a chunk's elements."""
        start, stop = self.bounds[chunk]
        return stop - start

    def form(self, chunk: int, dtype: torch.dtype) -> SparseFormat:
        """How the elements of a chunk that are sent are written."""
        return smallest(self.among, self.counts[chunk], self.length(chunk), 1, dtype)

    def layout(self, chunk: int, dtype: torch.dtype) -> Format:
        """The layout of a chunk's payload."""
        form = self.form(chunk, dtype)
        return form.layout(self.counts[chunk], self.length(chunk), 1, dtype)


@lru_cache(maxsize=4096)
def chunked(
    numel: int, dtype: torch.dtype, world: int, density: float, among: Formats
) -> Chunked:
    """The chunks of ``numel`` elements for ``world`` ranks of a team, each with its
    share.
    """
    bounds = chunk_bounds(numel, world)
    kept = share_of(density, numel)
    edges = [
        kept * stop // max(1, numel) for stop in (0, *(stop for _, stop in bounds))
    ]
    counts = tuple(
        min(stop - start, max(1, edges[chunk + 1] - edges[chunk]))
        for chunk, (start, stop) in enumerate(bounds)
    )
    return Chunked(bounds, counts, dtype, among)


class Shelf:
    """A rank's room for a payload of each chunk in ``order``, one behind the other."""

    def __init__(
        self,
        me: Member,
        chunks: Chunked,
        order: Sequence[int],
        name: str,
        dtype: torch.dtype,
        like: Tensor,
    ) -> None:
        self.me = me
        self.chunks = chunks
        self.order = order
        self.dtype = dtype
        self.layouts = [chunks.layout(chunk, dtype) for chunk in order]
        self.edges = [
            *accumulate((form.slot_bytes for form in self.layouts), initial=0)
        ]
        self.buffer = me.scratch(name, self.edges[-1], like, torch.uint8)

    def span(self, places: range) -> Tensor:
        """The bytes of adjacent places."""
        return self.buffer[self.edges[places.start] : self.edges[places.stop]]

    def write(self, place: int, entries: Entries) -> None:
        """Encodes a chunk's entries."""
        chunk = self.order[place]
        room = self.span(range(place, place + 1))[: self.layouts[place].size_bytes]
        self.chunks.form(chunk, self.dtype).encode(
            entries, self.chunks.length(chunk), room
        )

    def read(self, *places: int) -> list[Entries]:
        """Decodes the entries at these places; they are valid until the next call."""
        packed = []
        lengths = []
        for place in places:
            chunk = self.order[place]
            layout = self.layouts[place]
            room = self.span(range(place, place + 1))[: layout.size_bytes]
            packed.append(
                Packed(self.chunks.form(chunk, self.dtype), Payload(layout, room))
            )
            lengths.append(self.chunks.length(chunk))
        return decoded(self.me, packed, lengths, 1)
