"""Aggregator: a rank's part in one step of CaSync-PS, as worker of all chunks and server of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..contract import Member, State
from ..contract.payload import slot_bytes
from ..contract.spec import working_dtype
from ..contract.tensorwise import decode_each, encode_each
from ..contract.verbs import Compute
from .steps.chunks import Chunks


class Aggregator:
    """The buffers, the codec's states and the computations of one rank in one message."""

    def __init__(
        self,
        me: Member,
        chunks: Chunks,
        states: Sequence[State],
        grad_N: Tensor,
        residual_N: Tensor | None,
    ) -> None:
        self.me, self.chunks, self.states = me, chunks, list(states)
        self.grad_N, self.residual_N = grad_N, residual_N
        self.codec = chunks.codecs[me.rank]
        self.varies = not self.codec.traits.exact_size
        self.others = [rank for rank in chunks.servers if rank != me.rank]
        """The other ranks that a payload is pushed to."""
        self.serves = me.rank in chunks.servers
        """Whether this rank is the server of a chunk."""
        self.limits = [form.size_bytes for form in chunks.formats]
        """The most bytes that each chunk's payload may have."""
        self.own_limits = [0 if r == me.rank else self.limits[me.rank] for r in range(me.world)]
        """The most bytes that each rank may push to this one."""
        self.sizes = [0] * me.world
        """Bytes of the payload that was encoded for each rank."""
        self._start, self._stop = chunks.bounds[me.rank]
        self._is_begun = False  # whether the mean holds anything of this step
        rooms = [form.slot_bytes for form in chunks.formats]
        self.merged = me.scratch("merged", max(rooms), grad_N, torch.uint8)
        """The room of the payload of the own chunk's mean."""
        rooms[me.rank] = 0
        self._whole = me.scratch("whole", sum(rooms), grad_N, torch.uint8)
        self._rooms = torch.split(self._whole, rooms)
        dtype = working_dtype(grad_N.dtype)
        self._mean_C = me.scratch("mean", self._stop - self._start, grad_N, dtype)

    def encoding(self, chunks: Sequence[int]) -> Compute:
        """Encodes these chunks, which are other ranks', and notes their sizes."""
        numel = sum(self.chunks.specs[chunk].numel for chunk in chunks)
        return Compute("encode", lambda: self._encode(chunks), numel)

    def merging(self, ranks: Sequence[int], told: Sequence[int], into: Sequence[Tensor]) -> Compute:
        """Adds to the own chunk's mean what these ranks pushed; this rank's part is here as it is.

        ``told`` and ``into`` are sizes and slots of all ranks' payloads.
        """
        numel = len(ranks) * (self._stop - self._start)
        return Compute("merge", lambda: self._merge(ranks, told, into), numel)

    def encoding_mean(self) -> Compute:
        """Encodes the own chunk's mean into ``merged``; its result is the payload's size."""
        return Compute("encode", self._encode_mean, self._stop - self._start)

    def giving_mean(self, out_C: Tensor) -> Compute:
        """Copies the own chunk's mean, and forgets the residual that arrived in it."""

        def give() -> None:
            out_C.copy_(self._mean_C)
            if self.residual_N is not None:
                self.residual_N[self._start : self._stop].zero_()

        return Compute("give", give, self._stop - self._start)

    def decoding(
        self, chunks: Sequence[int], slots: Sequence[Tensor], told: Sequence[int], out_N: Tensor
    ) -> Compute:
        """Writes the means of these chunks; ``slots`` and ``told`` are of all chunks' payloads."""

        def decode() -> None:
            codecs, outs = self.chunks.codecs, self.chunks.of(out_N)
            payloads = [self.chunks.payload(chunk, slots[chunk], told[chunk]) for chunk in chunks]
            decode_each([codecs[c] for c in chunks], payloads, [outs[c] for c in chunks])

        return Compute("decode", decode, sum(self.chunks.specs[chunk].numel for chunk in chunks))

    def landing(self, told: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Room for what each rank pushes, as a whole and as slots one behind the other."""
        slots = list(map(slot_bytes, told))
        whole = self.me.scratch("arrived", sum(slots), self.grad_N, torch.uint8, varies=self.varies)
        return whole, list(torch.split(whole, slots))

    def pulled(self, told: Sequence[int], out_N: Tensor) -> list[Tensor]:
        """The slots of all chunks' means: room for those of others, and the own one."""
        me = self.me
        sizes = [0 if rank == me.rank else slot_bytes(size) for rank, size in enumerate(told)]
        whole = me.scratch("pulled", sum(sizes), out_N, torch.uint8, varies=self.varies)
        slots = list(torch.split(whole, sizes))
        slots[me.rank] = self.merged[: slot_bytes(told[me.rank])]
        return slots

    def slots(self) -> list[Tensor]:
        """The payload that is pushed to each rank, rounded up to 8 bytes."""
        sizes = map(slot_bytes, self.sizes if self.varies else self.limits)
        return [room[:size] for room, size in zip(self._rooms, sizes, strict=True)]

    def packed(self) -> Tensor:
        """The slots one behind the other, without the gaps that payloads of varying sizes leave."""
        if not self.varies:
            return self._whole
        slots = self.slots()
        sizes = list(map(len, slots))
        packed = self.me.scratch("packed", sum(sizes), self.grad_N, torch.uint8, varies=True)
        torch._foreach_copy_(torch.split(packed, sizes), slots)
        return packed

    def _encode(self, chunks: Sequence[int]) -> None:
        grads, nothing = self.chunks.of(self.grad_N), [None] * self.me.world
        residuals = nothing if self.residual_N is None else self.chunks.of(self.residual_N)
        sent = encode_each(
            [self.chunks.codecs[chunk] for chunk in chunks],
            [self.states[chunk] for chunk in chunks],
            [grads[chunk] for chunk in chunks],
            [residuals[chunk] for chunk in chunks],
            [self._rooms[chunk][: self.limits[chunk]] for chunk in chunks],
        )
        for chunk, (payload, state) in zip(chunks, sent, strict=True):
            self.sizes[chunk], self.states[chunk] = payload.size_bytes, state

    def _merge(self, ranks: Sequence[int], told: Sequence[int], into: Sequence[Tensor]) -> None:
        me, (start, stop) = self.me, (self._start, self._stop)
        if not self._is_begun:
            self._is_begun = True
            self._mean_C.zero_()
        for rank in ranks:
            if rank != me.rank:
                payload = self.chunks.payload(me.rank, into[rank], told[rank])
                self.codec.merge(payload, self._mean_C, scale=1 / me.world)
                continue
            self._mean_C.add_(self.grad_N[start:stop], alpha=1 / me.world)
            if self.residual_N is not None:  # it has arrived then
                self._mean_C.add_(self.residual_N[start:stop], alpha=1 / me.world)

    def _encode_mean(self) -> int:
        """W times what is lost is this rank's residual: a W-th of that reaches the next mean."""
        me, residual_C = self.me, None
        if self.residual_N is not None:
            residual_C = self.residual_N[self._start : self._stop].zero_()
        # A lossless codec's wire is of the gradient's own dtype; others take the mean unrounded.
        is_lossless = self.codec.traits.lossless
        value_C = self._mean_C.to(self.grad_N.dtype) if is_lossless else self._mean_C
        room = self.merged[: self.limits[me.rank]]
        payload, self.states[me.rank] = self.codec.encode(
            self.states[me.rank], value_C, residual_N=residual_C, buffer=room
        )
        if residual_C is not None:
            # W times a loss of gradients near the end of the range may leave it.
            residual_C.mul_(me.world)
            torch.nan_to_num_(residual_C, nan=0.0, posinf=0.0, neginf=0.0)
        return payload.size_bytes
