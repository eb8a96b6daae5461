"""CaSync-PS: a parameter server whose aggregators sit with the ranks, compression-aware.

Source: HiPress (Wu et al.) section 3.1 and figure 2; bulk communication of sections 3.2 and 5.1;
    aggregators co-located with workers as in section 6.
Differences: small payloads, of which all can be on their way at once, are pushed by one all-to-all
    and pulled by one all-gather. Of table 3, with K = N chunks, the N encodes are ours (N - 1
    pushed chunks, then the mean of the own one) and so are the N - 1 merges; what is pulled comes
    all at once, and none of its N decodes overlaps with a transfer, where the paper counts the last
    of them alone. Larger ones go in rounds, as section 3.2's coordinator would send them; rounds
    follow from sizes that all ranks know, so nobody coordinates. What the next round sends is
    encoded beside a round, and what the last one brought is merged. Pulls go round a ring, each
    chunk decoded beside the next hop. Nothing travels beside the encodes of the first round and of
    the mean, the merges of the last round, and the decode of one chunk.
Wire: W chunks. Push: the payload of chunk c goes to rank c. Pull: the payload of the merged chunk
    goes to all. A slot is a payload rounded up to 8 bytes, and a rank pushes the slots of all
    chunks but its own. It pulls (W-1) * (largest slot) bytes at once, or passes on the slots of all
    chunks but its right neighbour's. Where sizes vary, they go first: 2 * 8 * (W-1) bytes, and
    nothing is encoded beside a push.
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

from ..bounds import check_whole
from ..contract import Compressor, Member, State
from ..contract.collective import Collective, Needs
from ..moves.chunks import check_partitions, chunks_of, first_server, first_states, rotated
from ..moves.rounds import FEW, ROOM_BYTES, distances, transfers
from ..moves.sizes import announced_bytes, tell_all, tell_each
from ..payload import slot_bytes
from ..spec import TensorSpec
from ..verbs import AllGather, AllToAll, Recv, Send, Steps
from ._aggregator import Aggregator
from .ring import hop


@dataclass(frozen=True, kw_only=True)
class casync_ps(Collective):
    """Chunk, encode, scatter, decode and merge, encode, gather, decode.

    ``partitions`` is the number of chunks, from 1 to the number of ranks, each with an aggregator;
    None is one a rank. ``room_bytes`` is the most that may be on its way to one rank at once;
    larger messages go in rounds.
    """

    needs: ClassVar[Needs] = Needs()
    partitions: int | None = None
    room_bytes: int = ROOM_BYTES

    def __post_init__(self) -> None:
        check_partitions(self.partitions)
        check_whole("room_bytes", self.room_bytes, "0 sends all in rounds", least=0)

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
        codec, first = me.variant_of(codec), first_server(me, self.partitions)
        numel, dtype = grad_N.numel(), grad_N.dtype
        chunks = chunks_of(codec, numel, dtype, me.world, self.partitions, first)
        own = Aggregator(me, chunks, rotated(state, first), grad_N, residual_N)
        at_once = self._is_small([form.slot_bytes for form in chunks.formats])
        yield from (_push_at_once if at_once else _push_in_rounds)(own)
        size_bytes = (yield own.encoding_mean()) if own.serves else 0
        told = yield from tell_all(me, codec, size_bytes, own.limits, grad_N)
        pull = _pull_by_hops
        if at_once:
            pull = _pull_at_once if self.partitions in (None, me.world) else _pull_from_few
        yield from pull(own, told, out_N)
        return rotated(tuple(own.states), -first)

    def wire_bytes(self, codec: Compressor, spec: TensorSpec, world: int) -> list[int]:
        codec = codec.for_world(world)
        formats = chunks_of(codec, spec.numel, spec.dtype, world, self.partitions).formats
        slots = [form.slot_bytes for form in formats]
        told = 2 * announced_bytes(codec, world)
        pushed = [told + sum(slots) - slots[rank] for rank in range(world)]
        if self._is_small(slots):
            is_full = self.partitions in (None, world)
            pulled = [max(slots)] * world if is_full else slots
            return [push + (world - 1) * slot for push, slot in zip(pushed, pulled, strict=True)]
        return [push + sum(slots) - slots[(r + 1) % world] for r, push in enumerate(pushed)]

    def _is_small(self, slots: Sequence[int]) -> bool:
        """Whether payloads of at most these sizes, one a rank, can all be on their way at once."""
        world = len(slots)
        return world < 3 or (world - 1) * max(slots) <= self.room_bytes


def _push_at_once(own: Aggregator) -> Steps[None]:
    me = own.me
    if own.others:
        yield own.encoding(own.others)
    told = yield from tell_each(me, own.codec, own.sizes, own.own_limits, own.grad_N)
    arrived, into = own.landing(told)
    slots = tuple(map(len, into))
    yield AllToAll(arrived, own.packed(), slots, tuple(map(slot_bytes, own.sizes)))
    if own.serves:
        yield own.merging(range(me.world), told, into)


def _push_in_rounds(own: Aggregator) -> Steps[None]:
    """Encodes for the next round and merges what the last one brought beside each round."""
    me = own.me
    rounds = distances(FEW, me.world)
    around = [[(me.rank + d) % me.world for d in away] for away in rounds]
    targets = [[rank for rank in ranks if rank in own.others] for ranks in around]
    sources = [[(me.rank - d) % me.world for d in away] for away in rounds]
    ahead = targets if own.codec.traits.exact_size else [own.others]
    if ahead[0]:
        yield own.encoding(ahead[0])
    told = yield from tell_each(me, own.codec, own.sizes, own.own_limits, own.grad_N)
    sent, (_, into), come = own.slots(), own.landing(told), [me.rank]
    for number, away in enumerate(rounds):
        beside = [own.merging(come, told, into)] if own.serves else []
        if number + 1 < len(ahead) and ahead[number + 1]:
            beside.append(own.encoding(ahead[number + 1]))
        yield (*transfers(me, away, sent, into, takers=own.chunks.servers), *beside)
        come = sources[number]
    if own.serves:
        yield own.merging(come, told, into)


def _pull_at_once(own: Aggregator, told: Sequence[int], out_N: Tensor) -> Steps[None]:
    me, slot = own.me, slot_bytes(max(told))
    whole = me.scratch("pulled", me.world * slot, out_N, torch.uint8, varies=own.varies)
    yield AllGather(whole, own.merged[:slot])
    yield own.decoding(range(me.world), whole.chunk(me.world), told, out_N)


def _pull_from_few(own: Aggregator, told: Sequence[int], out_N: Tensor) -> Steps[None]:
    """Every aggregator sends its mean to all other ranks: an all-gather would send nothing for
    those that are none."""
    me, servers = own.me, own.chunks.servers
    slots = own.pulled(told, out_N)
    sent = [Send(rank, slots[me.rank]) for rank in range(me.world) if rank != me.rank]
    taken = [Recv(rank, slots[rank]) for rank in servers if rank != me.rank]
    yield (*(sent if own.serves else ()), *taken)
    yield own.decoding(servers, slots, told, out_N)


def _pull_by_hops(own: Aggregator, told: Sequence[int], out_N: Tensor) -> Steps[None]:
    """Passes merged chunks on round the ring, and decodes each beside the hop that passes it on."""
    me, servers, slots = own.me, own.chunks.servers, own.pulled(told, out_N)
    for step in range(me.world - 1):
        out, into = (me.rank - step) % me.world, (me.rank - step - 1) % me.world
        ready = own.decoding([out], slots, told, out_N) if out in servers else None
        yield from hop(me, slots[out], slots[into], beside=ready)
    if (last := (me.rank + 1) % me.world) in servers:
        yield own.decoding([last], slots, told, out_N)


EXAMPLES = (casync_ps(),)
