"""spardl: sums that are cut to their largest elements again before each time they are sent.

Source: Zhao et al., ICDE 2024, "SparDL: Distributed deep learning training with efficient sparse
    communication": Spar-Reduce-Scatter, global residual collection, Bruck's all-gather.
Differences from the paper:
    - All ranks are one team: no Spar-All-Gather among teams.
    - A chunk (the paper's block) is cut once, right before it is sent, from all that its sender
      holds of it by then: own elements and the sums that came. So a rank looks at each element once
      in a step.
    - Places are relative to their chunk, in the shortest code (``sparse/choose``), where the paper
      sends 4 bytes each. With ``formats="coo"`` it is the paper's form.
    - The mean travels in the gradient's dtype, rounded by the one rank that has the whole sum.
    - Sums are divided by W at the end. A sum beyond the working dtype's range arrives as inf.
Default: density 0.01 is the literature's, for long trainings. The first 400 steps of a small GPT
    end 44 % behind dense with it, as an element waits for 100 steps (docs/measured.md).
Density: as asked, to the element; each of the W chunks has its share of it, and at least 1 element.
Wire: with R = ceil(log2 W), in each of R rounds the chunks of distances g to g + s - 1 to rank + g,
    for g = 2^(R-1), ..., 2, 1 and s = W - 2^(R-1), then g; and in R more rounds the same numbers of
    chunks of the mean, back. So a rank sends W-1 chunks and W-1 chunks of the mean. A chunk of L
    elements, K of them sent, is K values of v bytes and the least of 4 K (COO), ceil(L / 8) (hash
    bitmap) and ceil(K b / 8) + ceil((K + floor((L - 1) / 2^b)) / 8) with b = floor(log2((L - 1) /
    K)) (``elias_fano``) bytes, rounded up to 8; v is the working dtype's, and of a mean the
    gradient's. In COO of float32 that is 2 (W-1)/W * 8 * K of all elements sent.
State: none. The sums that a rank holds lie in its residual while they are made.
Contributed: this rank's share of the mean. An element of a sum that is cut stays in the residual of
    the rank that cuts it, with all that others have sent for it: what another rank would have had
    to keep is this one's now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.compress._coo import check_addressable, share_of
from gradwire.compress._residual import as_working
from gradwire.contract import Exchange, Layout, Member, Selection, State, Traits, synchronise_alone
from gradwire.contract.bounds import check_share
from gradwire.contract.payload import Format, Payload
from gradwire.contract.spec import TensorSpec, chunk_bounds, working_dtype
from gradwire.contract.verbs import Compute, Recv, Send, Steps
from gradwire.kernels import select
from gradwire.kernels.sparse.choose import Formats, smallest
from gradwire.kernels.sparse.entries import Entries, Part
from gradwire.kernels.sparse.format import SparseFormat
from gradwire.kernels.sparse.scatter import scatter_entries

from ._lists import FORMATS, check_formats


@dataclass(frozen=True, kw_only=True)
class spardl(Exchange):
    """Averages a ``density`` share of the elements, the largest of sums that W ranks make.

    ``density`` is k/n in (0, 1]; ``formats`` says how chunks are written: in the "smallest" of
    several formats, or in "coo" alone, as in the paper. All ranks have the same.

    >>> from gradwire.exchange.by_name import run_local
    >>> grads = [torch.tensor([1.0, 0.0, 4.0, 2.0]), torch.tensor([8.0, 2.0, 0.0, 2.0])]
    >>> run_local(spardl(density=0.25), grads)[0][0]
    tensor([4.5000, 0.0000, 0.0000, 0.0000])
    """

    density: float = 0.01
    formats: str = "smallest"
    traits: ClassVar[Traits] = Traits(
        layout=Layout.SPARSE, error_feedback=True, density_range=(1.0, 1.0)
    )

    def __post_init__(self) -> None:
        check_share("spardl density", self.density)
        check_formats("spardl formats", self.formats)

    def init(self, spec: TensorSpec, world: int) -> State:
        check_addressable("spardl", spec)
        return None

    def synchronise(
        self,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None = None,
    ) -> Steps[State]:
        if me.world == 1:
            me.selection = None
            yield from synchronise_alone(grad_N, out_N, residual_N)
            return state
        chunks = self.chunks(TensorSpec("", grad_N.numel(), grad_N.dtype), me.world)
        yield from _Turn(me, chunks, grad_N, out_N, residual_N).text()
        count = sum(chunks.counts)
        me.selection = Selection(self.density * grad_N.numel(), count, count)
        return state

    def chunks(self, spec: TensorSpec, world: int) -> Chunked:
        """The chunks of a gradient among ``world`` ranks."""
        return _chunked(spec.numel, spec.dtype, world, self.density, FORMATS[self.formats])


@lru_cache(maxsize=256)
def rounds(world: int) -> tuple[tuple[int, int], ...]:
    """The rounds of Spar-Reduce-Scatter: (distance of the rank that is sent to, number of chunks).

    The all-gather has the same rounds, the last one first.

    >>> rounds(6), rounds(8)
    (((4, 2), (2, 2), (1, 1)), ((4, 4), (2, 2), (1, 1)))
    """
    distances = [1 << i for i in reversed(range((world - 1).bit_length()))]
    return tuple((g, world - g if place == 0 else g) for place, g in enumerate(distances))


@dataclass(frozen=True)
class Chunked:
    """A gradient cut into as many ranges as there are ranks, of which each rank sums up one."""

    bounds: tuple[tuple[int, int], ...]
    counts: tuple[int, ...]
    """How many elements of each chunk are sent: at least 1, but of an empty one none."""
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
def _chunked(numel: int, dtype: torch.dtype, world: int, density: float, among: Formats) -> Chunked:
    bounds = chunk_bounds(numel, world)
    kept = share_of(density, numel)
    edges = [kept * stop // max(1, numel) for stop in (0, *(stop for _, stop in bounds))]
    counts = tuple(
        min(stop - start, max(1, edges[chunk + 1] - edges[chunk]))
        for chunk, (start, stop) in enumerate(bounds)
    )
    return Chunked(bounds, counts, dtype, among)


class _Turn:
    """One rank's step. Places 0, 1, ... stand for the chunks rank, rank + 1, ... (mod W).

    Sums are made in ``pending_N``, so what of them is not sent is a residual already.
    """

    def __init__(
        self, me: Member, chunks: Chunked, grad_N: Tensor, out_N: Tensor, residual_N: Tensor | None
    ) -> None:
        self.me, self.chunks, self.grad_N, self.out_N = me, chunks, grad_N, out_N
        self.is_kept = residual_N is not None
        if residual_N is None:
            residual_N = me.scratch("pending", grad_N.numel(), grad_N, chunks.sum_dtype)
        self.pending_N = residual_N
        self.sums = _Shelf(me, chunks, "sums", chunks.sum_dtype, grad_N)
        self.means = _Shelf(me, chunks, "means", chunks.dtype, grad_N)

    def text(self) -> Steps[None]:
        """Spar-Reduce-Scatter, then the all-gather of the chunks of the mean."""
        rank, world = self.me.rank, self.me.world
        if not self.is_kept:
            yield self._compute("encode", range(world), self._begin)
        for distance, count in rounds(world):
            away, here = range(distance, distance + count), range(count)
            yield self._compute("encode", away, self._cut)
            yield (
                Send((rank + distance) % world, self.sums.span(away)),
                Recv((rank - distance) % world, self.sums.span(here)),
                # Of these chunks the gradient has been read: the mean may take its place.
                self._compute("decode", away, self._clear),
            )
            yield self._compute("merge", here, self._add)
        held = range(1)
        yield self._compute("encode", held, self._finish)
        for distance, count in reversed(rounds(world)):
            landing = range(distance, distance + count)
            yield (
                Send((rank - distance) % world, self.means.span(range(count))),
                Recv((rank + distance) % world, self.means.span(landing)),
                self._compute("decode", held, self._put),
            )
            held = landing
        yield self._compute("decode", held, self._put)

    def _compute(self, name: str, places: range, work: Callable[[range], None]) -> Compute:
        """``work`` on the chunks at these places."""
        numel = sum(self.chunks.length(self._chunk(place)) for place in places)
        return self.me.sized(name, partial(work, places), numel)

    def _chunk(self, place: int) -> int:
        return (self.me.rank + place) % self.me.world

    def _begin(self, places: range) -> None:
        self.pending_N.zero_()

    def _cut(self, places: range) -> None:
        """Takes the largest elements of these chunks, with what came for them, to be sent."""
        for place in places:
            self.sums.write(place, self._largest(place))

    def _largest(self, place: int) -> Entries:
        chunk = self._chunk(place)
        (start, stop), count = self.chunks.bounds[chunk], self.chunks.counts[chunk]
        pending_L = self.pending_N[start:stop]
        indices_K = self.me.passing("places", count, pending_L, torch.int32)
        values_K = self.me.passing("values", count, pending_L, pending_L.dtype)
        select.topk(as_working(self.grad_N[start:stop]), indices_K, values_K, pending_L)
        return Entries(indices_K, values_K)

    def _add(self, places: range) -> None:
        """Adds what came to what this rank holds of these chunks."""
        for place in places:
            start, stop = self.chunks.bounds[self._chunk(place)]
            came = self.sums.read(place)
            select.scatter_add(came.indices_K, came.values, self.pending_N[start:stop])

    def _finish(self, places: range) -> None:
        """Makes the mean of the own chunk, whose sum is whole now."""
        indices_K, sums_K, _ = self._largest(0)
        mean_K = sums_K.mul_(1 / self.me.world).to(self.chunks.dtype)
        self.means.write(0, Entries(indices_K, mean_K))

    def _clear(self, places: range) -> None:
        for place in places:
            start, stop = self.chunks.bounds[self._chunk(place)]
            self.out_N[start:stop].zero_()

    def _put(self, places: range) -> None:
        """Writes the mean of these chunks."""
        if 0 in places:
            self._clear(range(1))
        for place in places:
            start, stop = self.chunks.bounds[self._chunk(place)]
            scatter_entries(self.means.read(place), Part(stop - start), self.out_N[start:stop])


class _Shelf:
    """A rank's room for one payload of every chunk, one behind the other, its own chunk's first."""

    def __init__(
        self, me: Member, chunks: Chunked, name: str, dtype: torch.dtype, like: Tensor
    ) -> None:
        self.me, self.chunks, self.dtype = me, chunks, dtype
        self.order = [*range(me.rank, me.world), *range(me.rank)]
        self.layouts = [chunks.layout(chunk, dtype) for chunk in self.order]
        self.edges = [*accumulate((form.slot_bytes for form in self.layouts), initial=0)]
        self.buffer = me.scratch(name, self.edges[-1], like, torch.uint8)

    def span(self, places: range) -> Tensor:
        """The bytes of adjacent places."""
        return self.buffer[self.edges[places.start] : self.edges[places.stop]]

    def write(self, place: int, entries: Entries) -> None:
        """Encodes a chunk's entries."""
        chunk = self.order[place]
        room = self.span(range(place, place + 1))[: self.layouts[place].size_bytes]
        self.chunks.form(chunk, self.dtype).encode(entries, self.chunks.length(chunk), room)

    def read(self, place: int) -> Entries:
        """Decodes a chunk's entries; they are valid until the next call."""
        chunk, layout = self.order[place], self.layouts[place]
        count, length = self.chunks.counts[chunk], self.chunks.length(chunk)
        room = self.me.passing("read", count, self.buffer, torch.int32)
        payload = Payload(layout, self.span(range(place, place + 1))[: layout.size_bytes])
        return self.chunks.form(chunk, self.dtype).decode(payload, length, room=room)


EXAMPLES = (spardl(), spardl(density=0.3), spardl(density=0.3, formats="coo"))
