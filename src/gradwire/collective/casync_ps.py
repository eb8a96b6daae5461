"""CaSync-PS: a parameter server whose aggregators sit with the ranks, compression-aware.

Source: HiPress (Wu et al.) section 3.1 and figure 2; bulk communication of section 5.1.
Differences: a rank's payload for itself is merged as the others are, so that every rank's gradient
    loses the same; the W transfers of a phase are one all-to-all, those of the other one
    all-gather.
Wire: W chunks. Push: the payload of chunk c goes to rank c. Pull: the payload of the merged chunk
    goes to all. (sum of the other chunks' slots) + (W-1) * (largest slot) bytes a rank, a slot
    being a payload rounded up to 8 bytes.
State: one codec state a chunk for the push, one for the pull.
Contributed: what the codec encoded, less, in the chunk a rank aggregates, W times what its
    re-encoding of the mean lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Compressor, Member, State
from ..payload import Format, Payload
from ..spec import TensorSpec, chunk_bounds, working_dtype
from ._types import Collective, Needs
from ._verbs import AllGather, AllToAll, Compute, Steps


class PSState(NamedTuple):
    """Codec states: of every chunk as a worker, of the own chunk as an aggregator."""

    push: tuple[State, ...]
    pull: State


class _Cut(NamedTuple):
    """Where the chunks and their payloads lie."""

    bounds: tuple[tuple[int, int], ...]
    formats: tuple[Format, ...]
    slots: tuple[int, ...]


@lru_cache(maxsize=4096)
def _cut(codec: Compressor, numel: int, dtype: torch.dtype, world: int) -> _Cut:
    bounds = chunk_bounds(numel, world)
    formats = tuple(codec.format(TensorSpec("", b - a, dtype)) for a, b in bounds)
    return _Cut(bounds, formats, tuple(f.slot_bytes for f in formats))


@dataclass(frozen=True, kw_only=True)
class casync_ps(Collective):
    """Chunk, encode, scatter, decode and merge, encode, gather, decode."""

    needs: ClassVar[Needs] = Needs(exact_size=True)

    def init(self, codec: Compressor, spec: TensorSpec, world: int) -> PSState:
        codec = codec.for_world(world)
        states = tuple(codec.init(spec.chunk(a, b)) for a, b in chunk_bounds(spec.numel, world))
        return PSState(states, codec.init(spec.chunk(*chunk_bounds(spec.numel, world)[0])))

    def run(
        self,
        codec: Compressor,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None,
    ) -> Steps[State]:
        codec = codec.for_world(me.world)
        cut = _cut(codec, grad_N.numel(), grad_N.dtype, me.world)
        own, largest = cut.slots[me.rank], max(cut.slots)
        start, stop = cut.bounds[me.rank]
        pushed = me.scratch("pushed", sum(cut.slots), grad_N, torch.uint8)
        arrived = me.scratch("arrived", me.world * own, grad_N, torch.uint8)
        merged = me.scratch("merged", largest, grad_N, torch.uint8)
        pulled = me.scratch("pulled", me.world * largest, grad_N, torch.uint8)

        push = yield Compute(
            "encode",
            lambda: _encode_chunks(codec, cut, state.push, grad_N, residual_N, pushed),
            grad_N.numel(),
        )
        yield AllToAll(arrived, pushed, (own,) * me.world, cut.slots)
        pull = yield Compute(
            "merge",
            lambda: _aggregate(codec, me, cut, state.pull, arrived, merged, grad_N, residual_N),
            me.world * (stop - start),
        )
        yield AllGather(pulled, merged)
        yield Compute("decode", lambda: _decode_chunks(codec, cut, pulled, out_N), grad_N.numel())
        return PSState(push, pull)

    def wire_bytes(self, codec: Compressor, spec: TensorSpec, world: int) -> list[int]:
        slots = _cut(codec.for_world(world), spec.numel, spec.dtype, world).slots
        return [sum(slots) - slots[r] + (world - 1) * max(slots) for r in range(world)]


def _encode_chunks(
    codec: Compressor,
    cut: _Cut,
    states: tuple[State, ...],
    grad_N: Tensor,
    residual_N: Tensor | None,
    pushed: Tensor,
) -> tuple[State, ...]:
    """Encodes every chunk into its slot of ``pushed``."""
    new, at = [], 0
    for (start, stop), form, slot, state in zip(
        cut.bounds, cut.formats, cut.slots, states, strict=True
    ):
        _, state = codec.encode(
            state,
            grad_N[start:stop],
            residual_N=None if residual_N is None else residual_N[start:stop],
            buffer=pushed[at : at + form.size_bytes],
        )
        new.append(state)
        at += slot
    return tuple(new)


def _aggregate(
    codec: Compressor,
    me: Member,
    cut: _Cut,
    state: State,
    arrived: Tensor,
    merged: Tensor,
    grad_N: Tensor,
    residual_N: Tensor | None,
) -> State:
    """Merges all ranks' payloads of the own chunk, in rank order, and encodes their mean."""
    start, stop = cut.bounds[me.rank]
    form, slot = cut.formats[me.rank], cut.slots[me.rank]
    mean_C = me.scratch("mean", stop - start, grad_N, working_dtype(grad_N.dtype))
    mean_C.zero_()
    for rank in range(me.world):
        payload = Payload(form, arrived[rank * slot : rank * slot + form.size_bytes])
        codec.merge(payload, mean_C, scale=1 / me.world)
    loss_C = None
    if residual_N is not None:
        loss_C = me.scratch("loss", stop - start, grad_N, mean_C.dtype).zero_()
    # A lossless codec's wire is of the gradient's own dtype; others take the mean unrounded.
    value_C = mean_C.to(grad_N.dtype) if codec.traits.lossless else mean_C
    _, state = codec.encode(state, value_C, residual_N=loss_C, buffer=merged[: form.size_bytes])
    if residual_N is not None and loss_C is not None:
        residual_C = residual_N[start:stop].add_(loss_C, alpha=me.world)
        # W times a loss of gradients near the end of the range may leave it.
        torch.nan_to_num_(residual_C, nan=0.0, posinf=0.0, neginf=0.0)
    return state


def _decode_chunks(codec: Compressor, cut: _Cut, pulled: Tensor, out_N: Tensor) -> None:
    largest = max(cut.slots)
    for rank, ((start, stop), form) in enumerate(zip(cut.bounds, cut.formats, strict=True)):
        at = rank * largest
        codec.decode(Payload(form, pulled[at : at + form.size_bytes]), out_N[start:stop])


EXAMPLES = (casync_ps(),)
