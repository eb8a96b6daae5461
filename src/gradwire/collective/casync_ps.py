"""CaSync-PS: a parameter server whose aggregators sit with the ranks, compression-aware.

Source: HiPress (Wu et al.) section 3.1 and figure 2; bulk communication of sections 3.2 and 5.1;
    aggregators co-located with workers as in section 6.
Differences: small payloads, of which all can be on their way at once, are pushed by one all-to-all
    and pulled by one all-gather. Of table 3, with K = N chunks, the N encodes are ours (N - 1
    pushed chunks, then the mean of the own one) and so are the N - 1 merges; what is pulled comes
    all at once, and N - 1 decodes overlap with no transfer, where the paper counts the last of
    them alone: to have the others overlap would take a latency more, and they take no longer than
    that. Larger ones go in rounds, as section 3.2's coordinator would send them; rounds
    follow from sizes that all ranks know, so nobody coordinates. What the next round sends is
    encoded beside a round, and what the last one brought is merged. Every aggregator sends its
    mean to the others in rounds too, and what a round has brought is decoded beside the next.
    Nothing travels beside the encodes of the first round and of the mean, nor beside the merges and
    decodes of the one chunk that the last rounds bring: three encodes and two decodes, where
    table 3 has N.
Partitions: 1 to W, of which the first has another server in each message of a step.
Wire: W chunks, some of them empty where there are fewer partitions. Push: the payload of chunk c
    goes to rank c. Pull: the payload of the merged chunk goes to all. A slot is a payload rounded
    up to 8 bytes, and a rank pushes the slots of all chunks but its own. It sends W - 1 times the
    slot of its own chunk; where an all-gather does, the largest slot. Where sizes vary, they go
    first: 2 * 8 * (W-1) bytes, and nothing is encoded beside a push.
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
from ..contract.bounds import check_whole
from ..contract.collective import Collective, Needs
from ..contract.payload import slot_bytes
from ..contract.spec import TensorSpec
from ..contract.verbs import AllGather, AllToAll, Steps
from ._aggregator import Aggregator
from .steps.chunks import Chunks, check_partitions, chunks_of, first_server, first_states, rotated
from .steps.rounds import ROOM_BYTES, distances, few, transfers
from .steps.sizes import tell_all, tell_each


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
        told = yield from tell_all(me, codec, size_bytes, own.limits)
        if at_once and self._is_full(me.world):
            yield from _pull_at_once(own, told, out_N)
        else:
            together = me.world - 1 if at_once else few(me.world)
            yield from _pull_in_rounds(own, together, told, out_N)
        return rotated(tuple(own.states), -first)

    def reduce_scatter(
        self,
        me: Member,
        chunks: Chunks,
        states: Sequence[State],
        grad_N: Tensor,
        out_C: Tensor,
        residual_N: Tensor | None,
    ) -> Steps[list[State]]:
        """The push alone: leaves the mean of the own chunk, of all ``chunks``, in ``out_C``.

        The own part of it is there unrounded, and keeps no residual.
        """
        own = Aggregator(me, chunks, states, grad_N, residual_N)
        at_once = self._is_small([form.slot_bytes for form in chunks.formats])
        yield from (_push_at_once if at_once else _push_in_rounds)(own)
        yield own.giving_mean(out_C)
        return own.states

    def _is_full(self, world: int) -> bool:
        """Whether every rank has a partition, so that an all-gather pulls nothing in vain."""
        return self.partitions in (None, world)

    def _is_small(self, slots: Sequence[int]) -> bool:
        """Whether payloads of at most these sizes, one a rank, can all be on their way at once."""
        world = len(slots)
        return world < 3 or (world - 1) * max(slots) <= self.room_bytes


def _push_at_once(own: Aggregator) -> Steps[None]:
    me = own.me
    if own.others:
        yield own.encoding(own.others)
    told = yield from tell_each(me, own.codec, own.sizes, own.own_limits)
    arrived, into = own.landing(told)
    slots = tuple(map(len, into))
    yield AllToAll(arrived, own.packed(), slots, tuple(map(slot_bytes, own.sizes)))
    if own.serves:
        yield own.merging(range(me.world), told, into)


def _push_in_rounds(own: Aggregator) -> Steps[None]:
    """Encodes for the next round and merges what the last one brought beside each round."""
    me = own.me
    rounds = distances(few(me.world), me.world)
    around = [[(me.rank + d) % me.world for d in away] for away in rounds]
    targets = [[rank for rank in ranks if rank in own.others] for ranks in around]
    sources = [[(me.rank - d) % me.world for d in away] for away in rounds]
    ahead = targets if own.codec.traits.exact_size else [own.others]
    if ahead[0]:
        yield own.encoding(ahead[0])
    told = yield from tell_each(me, own.codec, own.sizes, own.own_limits)
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
    slots, mean = whole.chunk(me.world), list(whole.chunk(me.world))
    mean[me.rank] = own.merged[:slot]
    gather = AllGather(whole, mean[me.rank])
    if own.serves:
        yield gather, own.decoding([me.rank], mean, told, out_N)
    else:
        yield gather
    if own.others:
        yield own.decoding(own.others, slots, told, out_N)


def _pull_in_rounds(
    own: Aggregator, together: int, told: Sequence[int], out_N: Tensor
) -> Steps[None]:
    """Every aggregator sends its mean to all others, ``together`` of them at a time.

    What a round has brought is decoded beside the next, the own mean beside the first.
    """
    me, servers, slots = own.me, own.chunks.servers, own.pulled(told, out_N)
    sent = [slots[me.rank]] * me.world
    ready = [me.rank] if own.serves else []
    for away in distances(together, me.world):
        beside = [own.decoding(ready, slots, told, out_N)] if ready else []
        yield (*transfers(me, away, sent, slots, givers=servers), *beside)
        sources = ((me.rank - distance) % me.world for distance in away)
        ready = [rank for rank in sources if rank in servers]
    if ready:
        yield own.decoding(ready, slots, told, out_N)


EXAMPLES = (casync_ps(),)
