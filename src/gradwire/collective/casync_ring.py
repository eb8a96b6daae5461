"""CaSync-Ring: a ring all-reduce that decodes, merges and encodes again at every hop.

Source: HiPress (Wu et al.) figure 1b and section 3.3 with table 3: of one chunk each, N encodes,
    and N decodes that overlap with no transfer: N - 1 that are merged, and the last one. The others
    are done while the chunk is passed on.
Differences: the mean, not the sum, is decoded at the end; each hop's loss is its rank's residual.
Partitions: 1 to W, of which the first begins at another rank in each message of a step.
Wire: W chunks; each rank sends the payload of every chunk but one while reducing and of every chunk
    but one while gathering: (sum of slots - slot r+1) + (sum of slots - slot r+2) bytes.
    So with W partitions. Of fewer, the other chunks are empty, and nothing is done for them.
State: one codec state a chunk.
Contributed: own gradient plus what arrived, less what left, in every chunk: a hop's re-encoding
    loss belongs to the rank that re-encoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..contract import Compressor, Member, State
from ..contract.collective import Collective, Needs
from ..moves.chunks import check_partitions, chunks_of, first_server, first_states, rotated
from ..payload import Payload
from ..spec import TensorSpec, working_dtype
from ..verbs import Compute, Steps
from .ring import hop


@dataclass(frozen=True, kw_only=True)
class casync_ring(Collective):
    """Decode, merge, encode at every hop of a ring; then pass the merged chunks on unchanged.

    ``partitions`` is the number of chunks, from 1 to the number of ranks; None is one a rank.
    """

    needs: ClassVar[Needs] = Needs(exact_size=True)
    partitions: int | None = None

    def __post_init__(self) -> None:
        check_partitions(self.partitions)

    def init(self, codec: Compressor, spec: TensorSpec, world: int) -> tuple[State, ...]:
        return first_states(codec, spec, world, self.partitions)

    def run(
        self,
        codec: Compressor,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None,
    ) -> Steps[State]:
        first = first_server(me, self.partitions)
        walk = _Walk(codec, me, state, grad_N, residual_N, self.partitions, first)
        rank, world = me.rank, me.world
        start, stop = walk.chunks.bounds[rank]
        if walk.numel(rank):
            yield walk.encoding(rank, grad_N[start:stop])
        for step in range(world - 1):
            out, into = (rank - step) % world, (rank - step - 1) % world
            yield from hop(me, walk.slot(out), walk.slot(into))
            if walk.numel(into):
                sum_C = yield walk.merging(into)
                yield walk.encoding(into, sum_C)
        for step in range(world - 1):
            out, into = (rank + 1 - step) % world, (rank - step) % world
            ready = walk.decoding(out, out_N) if walk.numel(out) else None
            yield from hop(me, walk.slot(out), walk.slot(into), beside=ready)
        if walk.numel(last := (rank + 2) % world):
            yield walk.decoding(last, out_N)
        return rotated(tuple(walk.states), -first)

    def wire_bytes(self, codec: Compressor, spec: TensorSpec, world: int) -> list[int]:
        codec = codec.for_world(world)
        formats = chunks_of(codec, spec.numel, spec.dtype, world, self.partitions).formats
        slots = [form.slot_bytes for form in formats]
        return [
            2 * sum(slots) - slots[(r + 1) % world] - slots[(r + 2) % world] for r in range(world)
        ]


class _Walk:
    """One message's buffers while its chunks walk round the ring."""

    def __init__(
        self,
        codec: Compressor,
        me: Member,
        states: tuple[Any, ...],
        grad_N: Tensor,
        residual_N: Tensor | None,
        partitions: int | None,
        first: int,
    ) -> None:
        self.me, self.states = me, list(rotated(states, first))
        # A lossless codec's wire is of the gradient's own dtype, in which a sum may overflow where
        # the mean does not: partial sums travel divided by W. Others take the sum unrounded.
        self.lossless = codec.traits.lossless
        codec = codec if self.lossless else me.variant_of(codec)
        self.unit = me.world if self.lossless else 1
        self.grad_N, self.residual_N = grad_N, residual_N
        numel, dtype = grad_N.numel(), grad_N.dtype
        self.chunks = chunks_of(codec, numel, dtype, me.world, partitions, first)
        self.most = max(spec.numel for spec in self.chunks.specs)
        ends = [0, *accumulate(form.slot_bytes for form in self.chunks.formats)]
        whole = me.scratch("walk", ends[-1], grad_N, torch.uint8)
        self.slots = [whole[a:b] for a, b in pairwise(ends)]

    def numel(self, chunk: int) -> int:
        return self.chunks.specs[chunk].numel

    def slot(self, chunk: int) -> Tensor:
        return self.slots[chunk]

    def payload(self, chunk: int) -> Payload:
        return self.chunks.payload(chunk, self.slots[chunk], self.chunks.formats[chunk].size_bytes)

    def merging(self, chunk: int) -> Compute:
        """Adds the own gradient to the partial sum that arrived; its result is the new sum_C."""
        return Compute("merge", lambda: self._merge(chunk), self.numel(chunk))

    def encoding(self, chunk: int, value_C: Tensor) -> Compute:
        """Makes the payload of a chunk's sum so far."""
        return Compute("encode", lambda: self._encode(chunk, value_C), self.numel(chunk))

    def decoding(self, chunk: int, out_N: Tensor) -> Compute:
        """Writes the mean of a chunk whose payload holds the sum of all ranks."""
        return Compute("decode", lambda: self._decode(chunk, out_N), self.numel(chunk))

    def _merge(self, chunk: int) -> Tensor:
        start, stop = self.chunks.bounds[chunk]
        dtype = working_dtype(self.grad_N.dtype)
        sum_C = self.me.scratch("sum", self.most, self.grad_N, dtype)[: stop - start]
        sum_C.copy_(self.grad_N[start:stop])
        self.chunks.codecs[chunk].merge(self.payload(chunk), sum_C, scale=self.unit)
        return sum_C

    def _encode(self, chunk: int, value_C: Tensor) -> None:
        start, stop = self.chunks.bounds[chunk]
        residual_C = None if self.residual_N is None else self.residual_N[start:stop]
        buffer = self.payload(chunk).buffer
        if self.lossless:
            value_C = (value_C / self.unit).to(self.grad_N.dtype)
            if residual_C is not None:
                residual_C.div_(self.unit)
        _, self.states[chunk] = self.chunks.codecs[chunk].encode(
            self.states[chunk], value_C, residual_N=residual_C, buffer=buffer
        )
        if self.lossless and residual_C is not None:
            residual_C.mul_(self.unit)

    def _decode(self, chunk: int, out_N: Tensor) -> None:
        start, stop = self.chunks.bounds[chunk]
        scale = self.unit / self.me.world
        self.chunks.codecs[chunk].decode(self.payload(chunk), out_N[start:stop], scale=scale)


EXAMPLES = (casync_ring(),)
