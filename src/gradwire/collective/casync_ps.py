"""CaSync-PS: a parameter server of the ranks themselves, compression-aware.

Source: HiPress (Wu et al.) section 3.1 and figure 2; bulk communication of sections 3.2
    and 5.1; aggregators co-located with workers as in section 6.
Differences: payloads so small that all can travel at once are pushed by one
    all-to-all and pulled by one all-gather. Of table 3, with K = N chunks, the N
    encodes are ours (N - 1 pushed chunks, then the mean of the own one) and so are the
    N - 1 merges. All pulled payloads come at once, so N - 1 decodes overlap with no
    transfer, where the paper counts the last of them alone. To overlap the others would
    take a latency more, and they take no longer than that. Larger payloads go in
    rounds, as section 3.2's coordinator would send them. Rounds follow from sizes that
    all ranks know, so nobody coordinates; a plan with ``bulk`` has a coordinator.
    Beside a round, the next round's payloads are encoded, and the payloads of the round
    before are merged. Every aggregator sends its mean to the others in rounds too, and
    each round is decoded beside the next.
    Nothing travels beside the encodes of the first round and of the mean, nor beside
    the merges and decodes of the one chunk that the last rounds bring: two encodes and
    two decodes, where table 3 has N.
Servers: with ``servers=S`` the last S ranks are servers alone, and the W - S others
    workers (table 3: alpha = 2 N, beta = K + 1, gamma = N + 1 with N workers). The mean
    is over workers. A server's gradient is never read, and no mean is sent to it.
Partitions: 1 to W, or to S. The first has another server in each message of a step.
Wire: W chunks, some of them empty where there are fewer partitions. Push: the payload
    of chunk c goes to rank c. Pull: the payload of the merged chunk goes to all. A slot
    is a payload rounded up to 8 bytes, and a rank pushes the slots of all chunks but
    its own. Then it sends the slot of its own chunk W - 1 times; an all-gather sends
    the largest slot instead. If sizes vary, they go first: 2 * 8 * (W-1) bytes, and
    nothing is encoded beside a push. With servers a worker pushes S chunks, and a
    server sends the slot of its chunk W - S times.
State: one codec state for each chunk: of the pushed payload, and for its own chunk of
the mean.
Contributed: the encoded gradient; of the chunk that a rank aggregates, all of its
    gradient, less W times the part that encoding the mean lost. This part enters the
    next mean as it is. If a push encoded it, W times, the push could lose more than the
    part itself, which would grow without bound. A server alone has this part only, of
    W - S times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..contract import Compressor, Member, Residual, State
from ..contract.bounds import check_whole
from ..contract.collective import Collective, Needs
from ..contract.payload import slot_bytes
from ..contract.spec import TensorSpec, clear_not_finite, working_dtype
from ..contract.verbs import AllGather, AllToAll, Compute, Steps
from ..errors import invalid
from .steps.chunks import (
    Chunks,
    check_partitions,
    chunks_of,
    first_server,
    first_states,
    rotated,
)
from .steps.rounds import ROOM_BYTES, distances, transfers
from .steps.sizes import announce_all, announce_each
from .steps.tensorwise import decode_each, encode_each
from .steps.wide_sums import unscaled_if_narrow


@dataclass(frozen=True, kw_only=True)
class casync_ps(Collective):
    """Averages each chunk of the gradient on one rank, which sends the mean to all.

    Args:
        partitions: The number of chunks, from 1 to the number of ranks; each has a rank
            that aggregates it. None (the default): one for each rank, which balances
            bytes best. Fewer chunks make fewer, larger payloads.
        room_bytes: The most bytes that may be on their way to one rank at once, from 0;
            default 512 KiB. Larger messages go in rounds, which overlap with encode and
            decode. 0 sends all in rounds.
        servers: The number of ranks that only aggregate, from 1. They are the last
            ranks: they hold no model, and call ``gw.serve``. None (the default): each
            rank trains and aggregates.
    """

    needs: ClassVar[Needs] = Needs()
    partitions: int | None = None
    room_bytes: int = ROOM_BYTES
    servers: int | None = None

    def __post_init__(self) -> None:
        check_partitions(self.partitions)
        check_whole("room_bytes", self.room_bytes, "0 sends all in rounds", least=0)
        if self.servers is not None:
            check_whole("servers", self.servers, "leave it out for none")

    def __repr__(self) -> str:
        """The settings; checkpoints of before there were servers name none."""
        named = f"partitions={self.partitions!r}, room_bytes={self.room_bytes!r}"
        if self.servers is not None:
            named += f", servers={self.servers!r}"
        return f"casync_ps({named})"

    @property
    def _num_chunks(self) -> int | None:
        """The number of chunks that are not empty by their number; None: one a rank."""
        return self.partitions or self.servers

    def init(
        self, codec: Compressor, spec: TensorSpec, world: int
    ) -> tuple[State, ...]:
        servers = self.servers
        if servers is not None and not (self.partitions or 1) <= servers < world:
            accepted = f"fewer than {world} ranks, and no fewer than partitions"
            raise invalid("servers", servers, accepted, "let more ranks train")
        return first_states(codec, spec, world, self._num_chunks)

    def run(
        self,
        codec: Compressor,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual,
    ) -> Steps[State]:
        numel = grad_N.numel()
        dtype = grad_N.dtype
        codec = unscaled_if_narrow(codec, me, TensorSpec("", numel, dtype))
        servers = self.servers
        first = first_server(me, self.partitions, servers)
        chunks = chunks_of(codec, numel, dtype, me.world, self._num_chunks, first)
        states = rotated(state, first)
        aggregator = Aggregator(me, chunks, states, grad_N, residual_N, servers or 0)
        at_once = self._is_small(chunks)
        yield from (_push_at_once if at_once else _push_in_rounds)(aggregator)
        size_bytes = (yield aggregator.encoding_mean()) if aggregator.serves else 0
        announced = yield from announce_all(me, codec, size_bytes, aggregator.limits)
        # every rank has a partition, so no all-gather pulls in vain
        if at_once and self._num_chunks in (None, me.world):
            yield from _pull_at_once(aggregator, announced, out_N)
        else:
            together = me.world - 1 if at_once else 1
            yield from _pull_in_rounds(aggregator, together, announced, out_N)
        return rotated(tuple(aggregator.states), -first)

    def reduce_scatter(
        self,
        me: Member,
        chunks: Chunks,
        states: Sequence[State],
        grad_N: Tensor,
        out_C: Tensor,
        residual_N: Residual,
    ) -> Steps[list[State]]:
        """The push alone: leaves the mean of the own one of ``chunks`` in ``out_C``.

        The own part of it is there unrounded, and keeps no residual.
        """
        aggregator = Aggregator(me, chunks, states, grad_N, residual_N)
        at_once = self._is_small(chunks)
        yield from (_push_at_once if at_once else _push_in_rounds)(aggregator)
        yield aggregator.giving_mean(out_C)
        return aggregator.states

    def _is_small(self, chunks: Chunks) -> bool:
        """Whether usual payloads, one a rank, can all be on their way at once."""
        world = len(chunks.codecs)
        return world < 3 or (world - 1) * chunks.usual_bytes <= self.room_bytes


def _push_at_once(aggregator: Aggregator) -> Steps[None]:
    me = aggregator.me
    if aggregator.others:
        yield aggregator.encoding(aggregator.others)
    announced = yield from announce_each(
        me, aggregator.codec, aggregator.sizes, aggregator.own_limits
    )
    arrived, into = aggregator.landing(announced)
    slots = tuple(map(slot_bytes, announced))
    sizes = tuple(map(slot_bytes, aggregator.sizes))
    yield AllToAll(arrived, aggregator.packed(), slots, sizes)
    if aggregator.serves:
        yield aggregator.merging(range(me.world), announced, into)


def _push_in_rounds(aggregator: Aggregator) -> Steps[None]:
    """Encodes for the next round and merges the last one's, beside each round."""
    me = aggregator.me
    rounds = distances(1, me.world)
    around = [(me.rank + away[0]) % me.world for away in rounds]
    targets = [[rank] if rank in aggregator.others else [] for rank in around]
    ahead = targets if aggregator.codec.traits.exact_size else [aggregator.others]
    if ahead[0]:
        yield aggregator.encoding(ahead[0])
    announced = yield from announce_each(
        me, aggregator.codec, aggregator.sizes, aggregator.own_limits
    )
    sent = aggregator.slots()
    (_, into) = aggregator.landing(announced)
    come = [me.rank]
    for number, away in enumerate(rounds):
        beside = (
            [aggregator.merging(come, announced, into)] if aggregator.serves else []
        )
        if number + 1 < len(ahead) and ahead[number + 1]:
            beside.append(aggregator.encoding(ahead[number + 1]))
        yield (
            *transfers(
                me,
                away,
                sent,
                into,
                takers=aggregator.chunks.servers,
                givers=aggregator.workers,
            ),
            *beside,
        )
        come = [(me.rank - away[0]) % me.world]
    if aggregator.serves:
        yield aggregator.merging(come, announced, into)


def _pull_at_once(
    aggregator: Aggregator, announced: Sequence[int], out_N: Tensor
) -> Steps[None]:
    me = aggregator.me
    slot = slot_bytes(max(announced))
    whole = me.scratch(
        "pulled", me.world * slot, out_N, torch.uint8, varies=aggregator.varies
    )
    slots = whole.chunk(me.world)
    mean = list(whole.chunk(me.world))
    mean[me.rank] = aggregator.merged[:slot]
    gather = AllGather(whole, mean[me.rank])
    if aggregator.serves:
        yield gather, aggregator.decoding([me.rank], mean, announced, out_N)
    else:
        yield gather
    if aggregator.others:
        yield aggregator.decoding(aggregator.others, slots, announced, out_N)


def _pull_in_rounds(
    aggregator: Aggregator, together: int, announced: Sequence[int], out_N: Tensor
) -> Steps[None]:
    """Every aggregator sends its mean to all others, ``together`` of them at a time.

    What a round has brought is decoded beside the next, the own mean beside the first.
    """
    me = aggregator.me
    slots = aggregator.pulled(announced, out_N)
    sent = [slots[me.rank]] * me.world
    wanted = aggregator.chunks.servers if aggregator.trains else []
    ready = [me.rank] if me.rank in wanted else []
    for away in distances(together, me.world):
        beside = [aggregator.decoding(ready, slots, announced, out_N)] if ready else []
        yield (
            *transfers(
                me,
                away,
                sent,
                slots,
                takers=aggregator.workers,
                givers=aggregator.chunks.servers,
            ),
            *beside,
        )
        sources = ((me.rank - distance) % me.world for distance in away)
        ready = [rank for rank in sources if rank in wanted]
    if ready:
        yield aggregator.decoding(ready, slots, announced, out_N)


class Aggregator:
    """One rank's part in a message, as worker of all chunks and server of one.

    It has the buffers, the codec's states and the computations. The last ``servers``
    ranks are servers alone.
    """

    def __init__(
        self,
        me: Member,
        chunks: Chunks,
        states: Sequence[State],
        grad_N: Tensor,
        residual_N: Residual,
        servers: int = 0,
    ) -> None:
        self.me = me
        self.workers = range(me.world - servers)
        self.trains = me.rank in self.workers
        """Whether this rank has a gradient, and takes the mean."""
        self.chunks = chunks
        self.states = list(states)
        self.grad_N = grad_N
        self.residual_N = residual_N
        self.codec = chunks.codecs[me.rank]
        self.varies = not self.codec.traits.exact_size
        takers = chunks.servers if self.trains else []
        self.others = [rank for rank in takers if rank != me.rank]
        """The other ranks that a payload is pushed to."""
        self.serves = me.rank in chunks.servers
        """Whether this rank is the server of a chunk."""
        self.limits = [form.size_bytes for form in chunks.formats]
        """The most bytes that each chunk's payload may have."""
        self.own_limits = [
            self.limits[me.rank] if r in self.workers and r != me.rank else 0
            for r in range(me.world)
        ]
        """The most bytes that each rank may push to this one."""
        self.sizes = [0] * me.world
        """Bytes of the payload that was encoded for each rank."""
        self._start, self._stop = chunks.bounds[me.rank]
        self._is_begun = False  # whether the mean holds anything of this step
        rooms = [form.slot_bytes for form in chunks.formats]
        self.merged = me.scratch("merged", max(rooms), grad_N, torch.uint8)
        """The room of the payload of the own chunk's mean."""
        rooms = [room if r in self.others else 0 for r, room in enumerate(rooms)]
        self._whole = me.scratch("whole", sum(rooms), grad_N, torch.uint8)
        self._rooms = self._whole.split_with_sizes(rooms)
        dtype = working_dtype(grad_N.dtype)
        self._mean_C = me.scratch("mean", self._stop - self._start, grad_N, dtype)

    def encoding(self, chunks: Sequence[int]) -> Compute:
        """Encodes these chunks, which are other ranks', and notes their sizes."""
        numel = sum(self.chunks.specs[chunk].numel for chunk in chunks)

        def usual() -> None:
            for chunk in chunks:
                self.sizes[chunk] = self.limits[chunk]

        return self.me.sized("encode", lambda: self._encode(chunks), numel, usual)

    def merging(
        self, ranks: Sequence[int], announced: Sequence[int], into: Sequence[Tensor]
    ) -> Compute:
        """Adds the payloads that these ranks pushed to the own chunk's mean, and this
        rank's part as it is.

        ``announced`` and ``into`` are sizes and slots of all ranks' payloads.
        """
        num_parts = sum(rank in self.workers for rank in ranks)
        numel = num_parts * (self._stop - self._start)
        return self.me.sized(
            "merge", lambda: self._merge(ranks, announced, into), numel
        )

    def encoding_mean(self) -> Compute:
        """Encodes the own chunk's mean into ``merged``.

        Its result is the payload's size.
        """
        numel = self._stop - self._start
        return self.me.sized(
            "encode", self._encode_mean, numel, lambda: self.limits[self.me.rank]
        )

    def giving_mean(self, out_C: Tensor) -> Compute:
        """Copies the own chunk's mean, and forgets the residual that arrived in it."""

        def give() -> None:
            out_C.copy_(self._mean_C)
            if self.residual_N is not None:
                self.residual_N[self._start : self._stop].zero_()

        return Compute("give", give, self._stop - self._start)

    def decoding(
        self,
        chunks: Sequence[int],
        slots: Sequence[Tensor],
        announced: Sequence[int],
        out_N: Tensor,
    ) -> Compute:
        """Writes the means of these chunks.

        ``slots`` and ``announced`` are of all chunks' payloads.
        """

        def decode() -> None:
            codecs = self.chunks.codecs
            outs = self.chunks.of(out_N)
            payloads = [
                self.chunks.payload(chunk, slots[chunk], announced[chunk])
                for chunk in chunks
            ]
            decode_each(
                [codecs[c] for c in chunks], payloads, [outs[c] for c in chunks]
            )

        numel = sum(self.chunks.specs[chunk].numel for chunk in chunks)
        return self.me.sized("decode", decode, numel)

    def landing(self, announced: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Room for each rank's push, as a whole and as successive slots."""
        slots = list(map(slot_bytes, announced))
        whole = self.me.scratch(
            "arrived", sum(slots), self.grad_N, torch.uint8, varies=self.varies
        )
        return whole, list(whole.split_with_sizes(slots))

    def pulled(self, announced: Sequence[int], out_N: Tensor) -> list[Tensor]:
        """The slots of all chunks' means: room for others' means, and the own mean."""
        me = self.me
        sizes = [
            slot_bytes(size) if self.trains and rank != me.rank else 0
            for rank, size in enumerate(announced)
        ]
        whole = me.scratch("pulled", sum(sizes), out_N, torch.uint8, varies=self.varies)
        slots = list(whole.split_with_sizes(sizes))
        slots[me.rank] = self.merged[: slot_bytes(announced[me.rank])]
        return slots

    def slots(self) -> list[Tensor]:
        """The payload that is pushed to each rank, rounded up to 8 bytes."""
        sizes = map(slot_bytes, self.sizes if self.varies else self.limits)
        return [room[:size] for room, size in zip(self._rooms, sizes, strict=True)]

    def packed(self) -> Tensor:
        """The slots in succession, without the gaps of payloads of varying sizes."""
        if not self.varies:
            return self._whole
        slots = self.slots()
        sizes = list(map(slot_bytes, self.sizes))
        packed = self.me.scratch(
            "packed", sum(sizes), self.grad_N, torch.uint8, varies=True
        )
        torch._foreach_copy_(packed.split_with_sizes(sizes), slots)
        return packed

    def _encode(self, chunks: Sequence[int]) -> None:
        grads = self.chunks.of(self.grad_N)
        nothing = [None] * self.me.world
        residuals = (
            nothing if self.residual_N is None else self.chunks.of(self.residual_N)
        )
        sent = encode_each(
            [self.chunks.codecs[chunk] for chunk in chunks],
            [self.states[chunk] for chunk in chunks],
            [grads[chunk] for chunk in chunks],
            [residuals[chunk] for chunk in chunks],
            [self._rooms[chunk][: self.limits[chunk]] for chunk in chunks],
        )
        for chunk, (payload, state) in zip(chunks, sent, strict=True):
            self.sizes[chunk] = payload.size_bytes
            self.states[chunk] = state

    def _merge(
        self, ranks: Sequence[int], announced: Sequence[int], into: Sequence[Tensor]
    ) -> None:
        own = self.me.rank
        part = slice(self._start, self._stop)
        scale = 1 / len(self.workers)
        if not self._is_begun:
            self._is_begun = True
            self._mean_C.zero_()
        for rank in ranks:
            if rank == own:
                if self.trains:
                    self._mean_C.add_(self.grad_N[part], alpha=scale)
                if self.residual_N is not None:  # it has arrived then
                    self._mean_C.add_(self.residual_N[part], alpha=scale)
            elif rank in self.workers:
                payload = self.chunks.payload(own, into[rank], announced[rank])
                self.codec.merge(payload, self._mean_C, scale=scale)

    def _encode_mean(self) -> int:
        """The loss times the number of workers is this rank's residual.

        One part of this number reaches the next mean.
        """
        me = self.me
        residual_C = None
        if self.residual_N is not None:
            residual_C = self.residual_N[self._start : self._stop].zero_()
        # A lossless codec's wire is of the gradient's own dtype; others take the mean
        # unrounded.
        is_lossless = self.codec.traits.lossless
        value_C = self._mean_C.to(self.grad_N.dtype) if is_lossless else self._mean_C
        room = self.merged[: self.limits[me.rank]]
        payload, self.states[me.rank] = self.codec.encode(
            self.states[me.rank], value_C, residual_N=residual_C, buffer=room
        )
        if residual_C is not None:
            # W times a loss of gradients near the end of the range may leave it.
            residual_C.mul_(len(self.workers))
            clear_not_finite(residual_C)
        return payload.size_bytes


EXAMPLES = (casync_ps(),)
