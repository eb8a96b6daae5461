"""CaSync-PS: a parameter server whose aggregators sit with the ranks, compression-aware.

Source: HiPress (Wu et al.) section 3.1 and figure 2; bulk communication of section 5.1.
Differences: a rank's payload for itself is merged as the others are, so that every rank's gradient
    loses the same; the W transfers of a phase are one all-to-all, those of the other one
    all-gather. So of table 3, with K = N chunks, the K + 1 encodes are ours (all chunks at once,
    then the mean of the own one), and so are N merges; but what is pulled comes all at once, and
    none of its N decodes overlaps with a transfer, where the paper counts the last of them alone.
Wire: W chunks. Push: the payload of chunk c goes to rank c. Pull: the payload of the merged chunk
    goes to all. (sum of the other chunks' slots) + (W-1) * (largest slot) bytes a rank, a slot
    being a payload rounded up to 8 bytes. Where sizes vary, they go first: 2 * 8 * (W-1) bytes.
State: one codec state a chunk for the push, one for the pull.
Contributed: what the codec encoded, less, in the chunk a rank aggregates, W times what its
    re-encoding of the mean lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Compressor, Member, State
from ..payload import Format, Payload, slot_bytes
from ..spec import TensorSpec, chunk_bounds, working_dtype
from ._sizes import announced_bytes, tell_all, tell_each
from ._types import Collective, Needs
from ._verbs import AllGather, AllToAll, Compute, Steps


class PSState(NamedTuple):
    """Codec states: of every chunk as a worker, of the own chunk as an aggregator."""

    push: tuple[State, ...]
    pull: State


class _Cut(NamedTuple):
    """The chunks, and the layout of the largest payload of each."""

    bounds: tuple[tuple[int, int], ...]
    specs: tuple[TensorSpec, ...]
    formats: tuple[Format, ...]

    def of(self, flat_N: Tensor) -> list[Tensor]:
        """The chunks of a flat gradient, residual or mean."""
        return [flat_N[start:stop] for start, stop in self.bounds]

    def payload(self, codec: Compressor, chunk: int, buffer: Tensor, size_bytes: int) -> Payload:
        """The payload of a chunk that lies at the front of ``buffer``."""
        form = self.formats[chunk]
        if size_bytes != form.size_bytes:
            form = codec.received(self.specs[chunk], size_bytes)
        return Payload(form, buffer[:size_bytes])


@lru_cache(maxsize=4096)
def _cut(codec: Compressor, numel: int, dtype: torch.dtype, world: int) -> _Cut:
    bounds = chunk_bounds(numel, world)
    specs = tuple(TensorSpec("", b - a, dtype) for a, b in bounds)
    return _Cut(bounds, specs, tuple(map(codec.format, specs)))


@dataclass(frozen=True, kw_only=True)
class casync_ps(Collective):
    """Chunk, encode, scatter, decode and merge, encode, gather, decode."""

    needs: ClassVar[Needs] = Needs()

    def init(self, codec: Compressor, spec: TensorSpec, world: int) -> PSState:
        codec = codec.for_world(world)
        chunks = [spec.chunk(a, b) for a, b in chunk_bounds(spec.numel, world)]
        # A name of its own: who drew the same numbers for a chunk and for the chunk's mean would
        # round both the same way, and what is unbiased would not be.
        mean = replace(chunks[0], name=f"{spec.name} mean")
        return PSState(tuple(map(codec.init, chunks)), codec.init(mean))

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
        cut = _cut(codec, grad_N.numel(), grad_N.dtype, me.world)
        limits = [form.size_bytes for form in cut.formats]
        start, stop = cut.bounds[me.rank]

        pushed, sizes, push = yield Compute(
            "encode",
            lambda: _encode_chunks(codec, me, cut, state.push, grad_N, residual_N),
            grad_N.numel(),
        )
        told = yield from tell_each(me, codec, sizes, [limits[me.rank]] * me.world, grad_N)
        slots = tuple(map(slot_bytes, told))
        arrived = me.scratch("arrived", sum(slots), grad_N, torch.uint8, varies=varies)
        yield AllToAll(arrived, pushed, slots, tuple(map(slot_bytes, sizes)))

        merged = me.scratch("merged", max(map(slot_bytes, limits)), grad_N, torch.uint8)
        mean_C = yield Compute(
            "merge",
            lambda: _merge(codec, me, cut, arrived, told, grad_N),
            me.world * (stop - start),
        )
        size_bytes, pull = yield Compute(
            "encode",
            lambda: _encode_mean(codec, me, cut, state.pull, mean_C, merged, grad_N, residual_N),
            stop - start,
        )
        told = yield from tell_all(me, codec, size_bytes, limits, grad_N)
        slot = slot_bytes(max(told))
        pulled = me.scratch("pulled", me.world * slot, grad_N, torch.uint8, varies=varies)
        yield AllGather(pulled, merged[:slot])
        yield Compute(
            "decode", lambda: _decode_chunks(codec, cut, pulled, told, out_N), grad_N.numel()
        )
        return PSState(push, pull)

    def wire_bytes(self, codec: Compressor, spec: TensorSpec, world: int) -> list[int]:
        formats = _cut(codec.for_world(world), spec.numel, spec.dtype, world).formats
        slots = [form.slot_bytes for form in formats]
        told = 2 * announced_bytes(codec, world)
        return [told + sum(slots) - slots[r] + (world - 1) * max(slots) for r in range(world)]


def _encode_chunks(
    codec: Compressor,
    me: Member,
    cut: _Cut,
    states: tuple[State, ...],
    grad_N: Tensor,
    residual_N: Tensor | None,
) -> tuple[Tensor, list[int], tuple[State, ...]]:
    """Encodes every chunk; returns the payloads one behind the other, their sizes, new states."""
    whole = me.scratch("whole", sum(f.slot_bytes for f in cut.formats), grad_N, torch.uint8)
    slots = torch.split(whole, [form.slot_bytes for form in cut.formats])
    sent = codec.encode_many(
        states,
        cut.of(grad_N),
        None if residual_N is None else cut.of(residual_N),
        [slot[: form.size_bytes] for slot, form in zip(slots, cut.formats, strict=True)],
    )
    sizes = [payload.size_bytes for payload, _ in sent]
    packed = whole if codec.traits.exact_size else _packed(me, slots, sizes)
    return packed, sizes, tuple(state for _, state in sent)


def _packed(me: Member, slots: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The payloads at the fronts of ``slots`` without the gaps between them."""
    fronts = [slot[: slot_bytes(size)] for slot, size in zip(slots, sizes, strict=True)]
    num_bytes = sum(map(len, fronts))
    packed = me.scratch("packed", num_bytes, slots[0], torch.uint8, varies=True)
    return torch.cat(fronts, out=packed)


def _merge(
    codec: Compressor,
    me: Member,
    cut: _Cut,
    arrived: Tensor,
    sizes: Sequence[int],
    grad_N: Tensor,
) -> Tensor:
    """The mean of all ranks' payloads of the own chunk, merged in rank order."""
    start, stop = cut.bounds[me.rank]
    mean_C = me.scratch("mean", stop - start, grad_N, working_dtype(grad_N.dtype)).zero_()
    slots = torch.split(arrived, [slot_bytes(size) for size in sizes])
    for slot, size in zip(slots, sizes, strict=True):
        codec.merge(cut.payload(codec, me.rank, slot, size), mean_C, scale=1 / me.world)
    return mean_C


def _encode_mean(
    codec: Compressor,
    me: Member,
    cut: _Cut,
    state: State,
    mean_C: Tensor,
    merged: Tensor,
    grad_N: Tensor,
    residual_N: Tensor | None,
) -> tuple[int, State]:
    """Encodes the mean of the own chunk, and keeps W times what that loses.

    Returns the size of the payload, at the front of ``merged``, and the new state.
    """
    start, stop = cut.bounds[me.rank]
    loss_C = None
    if residual_N is not None:
        loss_C = me.scratch("loss", stop - start, grad_N, mean_C.dtype).zero_()
    # A lossless codec's wire is of the gradient's own dtype; others take the mean unrounded.
    value_C = mean_C.to(grad_N.dtype) if codec.traits.lossless else mean_C
    room = merged[: cut.formats[me.rank].size_bytes]
    payload, state = codec.encode(state, value_C, residual_N=loss_C, buffer=room)
    if residual_N is not None and loss_C is not None:
        residual_C = residual_N[start:stop].add_(loss_C, alpha=me.world)
        # W times a loss of gradients near the end of the range may leave it.
        torch.nan_to_num_(residual_C, nan=0.0, posinf=0.0, neginf=0.0)
    return payload.size_bytes, state


def _decode_chunks(
    codec: Compressor, cut: _Cut, pulled: Tensor, sizes: Sequence[int], out_N: Tensor
) -> None:
    slots = pulled.chunk(len(sizes))
    payloads = [
        cut.payload(codec, chunk, slot, size)
        for chunk, (slot, size) in enumerate(zip(slots, sizes, strict=True))
    ]
    codec.decode_many(payloads, cut.of(out_N))


EXAMPLES = (casync_ps(),)
