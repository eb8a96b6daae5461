"""CaSync-PS: a parameter server whose aggregators sit with the ranks, compression-aware.

Source: HiPress (Wu et al.) section 3.1 and figure 2; bulk communication of section 5.1; aggregators
    co-located with workers as in section 6.
Differences: the W - 1 transfers of a phase are one all-to-all, those of the other one all-gather.
    Of table 3, with K = N chunks, the N encodes are ours (N - 1 pushed chunks, then the mean of the
    own one) and so are the N - 1 merges; what is pulled comes all at once, and none of its N
    decodes overlaps with a transfer, where the paper counts the last of them alone.
Wire: W chunks. Push: the payload of chunk c goes to rank c. Pull: the payload of the merged chunk
    goes to all. (sum of the other chunks' slots) + (W-1) * (largest slot) bytes a rank, a slot
    being a payload rounded up to 8 bytes. Where sizes vary, they go first: 2 * 8 * (W-1) bytes.
State: one codec state a chunk: of what this rank pushes, and in its own chunk of the mean.
Contributed: what the codec encoded; of the chunk that a rank aggregates, all of its gradient,
    less W times what encoding the mean lost. That loss enters the next mean as it is: were it
    encoded for a push, W times, more could be lost of it than it was, and it would grow for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..contract import Compressor, Member, State
from ..contract.collective import Collective, Needs
from ..moves.chunks import Chunks, chunks_of, first_states
from ..moves.sizes import announced_bytes, tell_all, tell_each
from ..payload import slot_bytes
from ..spec import TensorSpec, working_dtype
from ..tensorwise import decode_each, encode_each
from ..verbs import AllGather, AllToAll, Compute, Steps


@dataclass(frozen=True, kw_only=True)
class casync_ps(Collective):
    """Chunk, encode, scatter, decode and merge, encode, gather, decode."""

    needs: ClassVar[Needs] = Needs()

    def init(self, codec: Compressor, spec: TensorSpec, world: int) -> tuple[State, ...]:
        return first_states(codec, spec, world)

    def run(
        self,
        codec: Compressor,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None,
    ) -> Steps[State]:
        codec, varies = me.variant_of(codec), not codec.traits.exact_size
        chunks = chunks_of(codec, grad_N.numel(), grad_N.dtype, me.world)
        limits = [form.size_bytes for form in chunks.formats]
        start, stop = chunks.bounds[me.rank]
        turn = _Turn(me, chunks, list(state), grad_N, residual_N)

        pushed, sizes = yield Compute("encode", turn.encode_others, grad_N.numel() - stop + start)
        own_limits = [limits[me.rank]] * me.world
        own_limits[me.rank] = 0
        told = yield from tell_each(me, codec, sizes, own_limits, grad_N)
        slots = tuple(map(slot_bytes, told))
        arrived = me.scratch("arrived", sum(slots), grad_N, torch.uint8, varies=varies)
        yield AllToAll(arrived, pushed, slots, tuple(map(slot_bytes, sizes)))

        mean_C = yield Compute(
            "merge", lambda: turn.merge(arrived, told), me.world * (stop - start)
        )
        merged = me.scratch("merged", max(map(slot_bytes, limits)), grad_N, torch.uint8)
        size_bytes = yield Compute("encode", lambda: turn.encode_mean(mean_C, merged), stop - start)
        told = yield from tell_all(me, codec, size_bytes, limits, grad_N)
        slot = slot_bytes(max(told))
        pulled = me.scratch("pulled", me.world * slot, grad_N, torch.uint8, varies=varies)
        yield AllGather(pulled, merged[:slot])
        yield Compute("decode", lambda: _decode(chunks, pulled, told, out_N), grad_N.numel())
        return tuple(turn.states)

    def wire_bytes(self, codec: Compressor, spec: TensorSpec, world: int) -> list[int]:
        formats = chunks_of(codec.for_world(world), spec.numel, spec.dtype, world).formats
        slots = [form.slot_bytes for form in formats]
        told = 2 * announced_bytes(codec, world)
        return [told + sum(slots) - slots[r] + (world - 1) * max(slots) for r in range(world)]


class _Turn:
    """One rank's part in one step: what it encodes and merges, and its codec states."""

    def __init__(
        self,
        me: Member,
        chunks: Chunks,
        states: list[State],
        grad_N: Tensor,
        residual_N: Tensor | None,
    ) -> None:
        self.me, self.chunks, self.states = me, chunks, states
        self.grad_N, self.residual_N = grad_N, residual_N
        self.start, self.stop = chunks.bounds[me.rank]
        self.codec = chunks.codecs[me.rank]

    def encode_others(self) -> tuple[Tensor, list[int]]:
        """Encodes all chunks but the own; returns payloads one behind the other, and sizes."""
        me, chunks = self.me, self.chunks
        rooms = [0 if chunk == me.rank else f.slot_bytes for chunk, f in enumerate(chunks.formats)]
        whole = me.scratch("whole", sum(rooms), self.grad_N, torch.uint8)
        slots = torch.split(whole, rooms)
        others = [chunk for chunk in range(me.world) if chunk != me.rank]
        grads, nothing = chunks.of(self.grad_N), [None] * me.world
        residuals = nothing if self.residual_N is None else chunks.of(self.residual_N)
        sent = encode_each(
            [chunks.codecs[chunk] for chunk in others],
            [self.states[chunk] for chunk in others],
            [grads[chunk] for chunk in others],
            [residuals[chunk] for chunk in others],
            [slots[chunk][: chunks.formats[chunk].size_bytes] for chunk in others],
        )
        sizes = [0] * me.world
        for chunk, (payload, state) in zip(others, sent, strict=True):
            sizes[chunk], self.states[chunk] = payload.size_bytes, state
        exact = self.codec.traits.exact_size
        return whole if exact else _packed(me, slots, sizes), sizes

    def merge(self, arrived: Tensor, sizes: Sequence[int]) -> Tensor:
        """The mean of the own chunk, in rank order: payloads of others, and what is here as it is.

        The residual here has arrived then.
        """
        me, (start, stop) = self.me, (self.start, self.stop)
        mean_C = me.scratch("mean", stop - start, self.grad_N, working_dtype(self.grad_N.dtype))
        mean_C.zero_()
        slots = torch.split(arrived, [slot_bytes(size) for size in sizes])
        for rank, (slot, size) in enumerate(zip(slots, sizes, strict=True)):
            if rank != me.rank:
                payload = self.chunks.payload(me.rank, slot, size)
                self.codec.merge(payload, mean_C, scale=1 / me.world)
                continue
            mean_C.add_(self.grad_N[start:stop], alpha=1 / me.world)
            if self.residual_N is not None:
                mean_C.add_(self.residual_N[start:stop], alpha=1 / me.world)
        return mean_C

    def encode_mean(self, mean_C: Tensor, merged: Tensor) -> int:
        """Encodes the mean into the front of ``merged``; returns its size.

        What that loses is this rank's residual, W times, as a W-th of it reaches the next mean.
        """
        me, residual_C = self.me, None
        if self.residual_N is not None:
            residual_C = self.residual_N[self.start : self.stop].zero_()
        # A lossless codec's wire is of the gradient's own dtype; others take the mean unrounded.
        value_C = mean_C.to(self.grad_N.dtype) if self.codec.traits.lossless else mean_C
        room = merged[: self.chunks.formats[me.rank].size_bytes]
        payload, self.states[me.rank] = self.codec.encode(
            self.states[me.rank], value_C, residual_N=residual_C, buffer=room
        )
        if residual_C is not None:
            # W times a loss of gradients near the end of the range may leave it.
            residual_C.mul_(me.world)
            torch.nan_to_num_(residual_C, nan=0.0, posinf=0.0, neginf=0.0)
        return payload.size_bytes


def _packed(me: Member, slots: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The payloads at the fronts of ``slots`` without the gaps between them."""
    fronts = [slot[: slot_bytes(size)] for slot, size in zip(slots, sizes, strict=True)]
    num_bytes = sum(map(len, fronts))
    packed = me.scratch("packed", num_bytes, slots[0], torch.uint8, varies=True)
    return torch.cat(fronts, out=packed)


def _decode(chunks: Chunks, pulled: Tensor, sizes: Sequence[int], out_N: Tensor) -> None:
    slots = pulled.chunk(len(sizes))
    payloads = [
        chunks.payload(chunk, slot, size)
        for chunk, (slot, size) in enumerate(zip(slots, sizes, strict=True))
    ]
    decode_each(chunks.codecs, payloads, chunks.of(out_N))


EXAMPLES = (casync_ps(),)
