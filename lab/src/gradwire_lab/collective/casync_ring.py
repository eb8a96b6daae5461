"""CaSync-Ring: a ring all-reduce that decodes, merges and encodes again at every hop.

Source: HiPress (Wu et al.) figure 1b and section 3.3 with table 3: of one chunk each, N
    encodes, and N decodes that overlap with no transfer: N - 1 that are merged, and the
    last one. The others are done while the chunk is passed on.
Differences: the mean, not the sum, is decoded at the end; each hop's loss is its rank's
    residual. ``pair`` gives it the compressor's variant for partial sums
    (``Compressor.for_sums``): onebit without stretch, as every hop would multiply by
    it, and qsgd with the largest magnitude as norm. A large message goes in two halves,
    the second a step behind the first: one is merged and encoded while the other is
    passed on. Then half a chunk each is encoded, merged and decoded beside which
    nothing travels, and not N, N - 1 and one. A sparsifier selects again at every hop
    (DGC by CaSync-Ring: section 5.3, figures 9 and 16), so a payload never holds more
    than the k elements of its chunk.
Partitions: 1 to W. The first begins at another rank in each message of a step.
Wire: W chunks; each rank sends the payload of every chunk but one while reducing and of
    every chunk but one while gathering: (sum of slots - slot r+1) + (sum of slots -
    slot r+2) bytes. So with W partitions. Of fewer, the other chunks are empty, and
    nothing is done for them. Where sizes vary, each slot is as large as its payload,
    and 8 bytes announce the size: 2 (W-1) times. While reducing that takes a latency
    a hop more. While gathering only the first size does, as the next one travels beside
    a payload.
State: one codec state a chunk.
Contributed: own gradient plus what arrived, less what left, in every chunk: a hop's
    re-encoding loss belongs to the rank that re-encoded. So do the elements that a hop
    does not select again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from gradwire.collective.steps.chunks import (
    check_partitions,
    chunks_of,
    first_server,
    first_states,
    rotated,
)
from gradwire.contract import Compressor, Layout, Member, Residual, State
from gradwire.contract.bounds import check_whole
from gradwire.contract.collective import Collective, Needs
from gradwire.contract.payload import Payload, slot_bytes
from gradwire.contract.spec import TensorSpec, chunk_bounds, working_dtype
from gradwire.contract.verbs import Compute, Recv, Send, Steps, Verb

# ---- Steps side by side --------------------------------------------------------------
#
# While one waits for the network, another computes.

T = TypeVar("T")


def staggered(all_steps: Sequence[Steps[T]]) -> Steps[list[T]]:
    """Runs steps of tuples side by side, each a tuple behind the one before it.

    Returns all results. All yield equally many tuples on every rank; some may be
    empty. So messages come to a rank in the order in which it takes them. If all
    tuples are empty, nothing is yielded.
    """
    results: list[Any] = [None] * len(all_steps)
    values: list[Any] = [None] * len(all_steps)
    open_steps = set(range(len(all_steps)))
    begun = 0
    while open_steps:
        begun += 1
        rows = {}
        for number in sorted(open_steps):
            if number < begun:
                try:
                    asked = all_steps[number].send(values[number])
                except StopIteration as stop:
                    results[number] = stop.value
                    open_steps.remove(number)
                else:
                    assert isinstance(asked, tuple), "steps of tuples"
                    rows[number] = asked
        verbs = [verb for row in rows.values() for verb in row]
        done = iter((yield tuple(verbs)) if verbs else ())
        for number, row in rows.items():
            values[number] = tuple(next(done) for _ in row)
    return results


# ---- the collective ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class casync_ring(Collective):
    """Decode, merge, encode at every hop of a ring.

    Then pass the merged chunks on unchanged.

    Args:
        partitions: The number of chunks, from 1 to the number of ranks. None (the
            default): one for each rank, which balances bytes best. Fewer make fewer,
            larger payloads.
        half_bytes: Bytes of a chunk's payload above which a message goes in two halves,
            from 0; default 128 KiB. One half is encoded while the other travels. 0
            sends all in two halves. A sparsifier's message never goes in halves.
    """

    needs: ClassVar[Needs] = Needs(exact_size_of_scales=True)
    encodes_sums: ClassVar[bool] = True
    partitions: int | None = None
    half_bytes: int = 128 * 1024

    def __post_init__(self) -> None:
        check_partitions(self.partitions)
        check_whole("half_bytes", self.half_bytes, "0 sends all in two halves", least=0)

    def init(
        self, codec: Compressor, spec: TensorSpec, world: int
    ) -> tuple[State, ...]:
        num_parts = self._num_parts(codec, spec, world)
        states: list[State] = []
        for start, stop in chunk_bounds(spec.numel, num_parts):
            own_codec = codec.chunk(start, stop)
            own_spec = spec.chunk(start, stop)
            states += first_states(own_codec, own_spec, world, self.partitions)
        return tuple(states)

    def run(
        self,
        codec: Compressor,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual,
    ) -> Steps[State]:
        # A lossless codec's wire is of the gradient's own dtype, in which a sum may
        # overflow where the mean does not: partial sums travel divided by W. Others
        # take the sum unrounded.
        if not codec.traits.lossless:
            codec = me.variant_of(codec)
        parts = chunk_bounds(grad_N.numel(), len(state) // me.world)
        first = first_server(me, self.partitions)
        walks = []
        for number, (start, stop) in enumerate(parts):
            residual_P = None
            if residual_N is not None:
                residual_P = residual_N[start:stop]
            own_codec = codec.chunk(start, stop)
            grad_P = grad_N[start:stop]
            out_P = out_N[start:stop]
            part_states = state[number * me.world :][: me.world]
            walk = _Walk(own_codec, me, grad_P, residual_P, number)
            walks.append(walk.steps(out_P, part_states, self.partitions, first))
        states = yield from staggered(walks)
        return tuple(state for part_states in states for state in part_states)

    def _num_parts(self, codec: Compressor, spec: TensorSpec, world: int) -> int:
        """How many parts of a message go round the ring, each by itself.

        A sparsifier's density may change in training, and with it the payload: so it
        has one.
        """
        if codec.traits.layout is Layout.SPARSE:
            return 1
        variant = codec.for_world(world)
        chunks = chunks_of(variant, spec.numel, spec.dtype, world, self.partitions)
        return 2 if chunks.usual_bytes > self.half_bytes else 1


class _Walk:
    """One part of a message while its chunks walk round the ring.

    ``number`` tells parts apart.
    """

    def __init__(
        self,
        codec: Compressor,
        me: Member,
        grad_N: Tensor,
        residual_N: Residual,
        number: int,
    ) -> None:
        self.codec = codec
        self.me = me
        self.number = number
        self.lossless = codec.traits.lossless
        self.unit = me.world if self.lossless else 1
        self.grad_N = grad_N
        self.residual_N = residual_N

    def steps(
        self, out_N: Tensor, states: tuple[Any, ...], partitions: int | None, first: int
    ) -> Steps[tuple[Any, ...]]:
        """Leaves the mean in ``out_N`` and returns new states.

        It yields tuples of verbs; some are empty.
        """
        grad_N = self.grad_N
        me = self.me
        rank = me.rank
        world = me.world
        self.states = list(rotated(states, first))
        self.chunks = chunks_of(
            self.codec, grad_N.numel(), grad_N.dtype, world, partitions, first
        )
        ends = [0, *accumulate(form.slot_bytes for form in self.chunks.formats)]
        whole = me.scratch(f"walk {self.number}", ends[-1], grad_N, torch.uint8)
        self.slots = [whole[a:b] for a, b in pairwise(ends)]
        self.sizes = [form.size_bytes for form in self.chunks.formats]
        varies = not self.codec.traits.exact_size
        if varies:
            self.announced_1 = me.announced(f"announced size {self.number}", 1)
            self.own_1 = me.announced(f"own size {self.number}", 1)
        most = max(spec.numel for spec in self.chunks.specs)
        dtype = working_dtype(grad_N.dtype)
        self.sum_C = me.scratch(f"sum {self.number}", most, grad_N, dtype)
        start, stop = self.chunks.bounds[rank]
        yield self.encoding(rank, grad_N[start:stop])
        for step in range(world - 1):
            out = (rank - step) % world
            into = (rank - step - 1) % world
            if varies:
                yield self.announcing(out, into)
                self.hear(into)
            yield self.forwarding(out, into)
            sum_C = self.sum_C[: self.numel(into)]
            yield (*self.merging(into), *self.encoding(into, sum_C))
        if varies:
            yield self.announcing((rank + 1) % world, rank)
            self.hear(rank)
        for step in range(world - 1):
            out = (rank + 1 - step) % world
            into = (rank - step) % world
            after = (rank - 1 - step) % world
            verbs = [*self.decoding(out, out_N), *self.forwarding(out, into)]
            announces_next = varies and step < world - 2
            if announces_next:
                verbs += self.announcing(into, after)
            yield tuple(verbs)
            if announces_next:
                self.hear(after)
        yield self.decoding((rank + 2) % world, out_N)
        return rotated(tuple(self.states), -first)

    def numel(self, chunk: int) -> int:
        return self.chunks.specs[chunk].numel

    def payload(self, chunk: int) -> Payload:
        return self.chunks.payload(chunk, self.slots[chunk], self.sizes[chunk])

    def forwarding(self, out: int, into: int) -> tuple[Verb, ...]:
        """Sends the payload of one chunk on, and receives another one's."""
        sent = self.slots[out][: slot_bytes(self.sizes[out])]
        come = self.slots[into][: slot_bytes(self.sizes[into])]
        return self._transfers(out, into, sent, come)

    def announcing(self, out: int, into: int) -> tuple[Verb, ...]:
        """The same of the payloads' sizes; ``hear`` takes what has come."""
        self.own_1.fill_(self.sizes[out])
        return self._transfers(out, into, self.own_1, self.announced_1)

    def hear(self, chunk: int) -> None:
        """Notes the size announced by the rank before, if its chunk was not empty."""
        if self.numel(chunk):
            limit = self.chunks.formats[chunk].size_bytes
            (self.sizes[chunk],) = self.me.sizes(
                self.announced_1, [limit], ranks=[self.me.left]
            )

    def _transfers(
        self, out: int, into: int, sent: Tensor, come: Tensor
    ) -> tuple[Verb, ...]:
        """One step along the ring.

        Nothing moves of an empty chunk; an empty payload does.
        """
        verbs: list[Verb] = []
        if self.numel(out):
            verbs.append(Send(self.me.right, sent))
        if self.numel(into):
            verbs.append(Recv(self.me.left, come))
        return tuple(verbs)

    def merging(self, chunk: int) -> tuple[Compute, ...]:
        """Adds the own gradient to the partial sum that arrived, into ``sum_C``."""
        return self._on(chunk, "merge", lambda: self._merge(chunk))

    def encoding(self, chunk: int, value_C: Tensor) -> tuple[Compute, ...]:
        """Makes the payload of a chunk's sum so far."""
        return self._on(chunk, "encode", lambda: self._encode(chunk, value_C))

    def decoding(self, chunk: int, out_N: Tensor) -> tuple[Compute, ...]:
        """Writes the mean of a chunk whose payload holds the sum of all ranks."""
        return self._on(chunk, "decode", lambda: self._decode(chunk, out_N))

    def _on(self, chunk: int, name: str, fn: Callable[[], None]) -> tuple[Compute, ...]:
        """A computation on a chunk; nothing on one that is empty."""
        numel = self.numel(chunk)
        if not numel:
            return ()
        return (Compute(name, fn, numel),)

    def _merge(self, chunk: int) -> None:
        start, stop = self.chunks.bounds[chunk]
        sum_C = self.sum_C[: stop - start]
        sum_C.copy_(self.grad_N[start:stop])
        codec = self.chunks.codecs[chunk]
        codec.merge(self.payload(chunk), sum_C, scale=self.unit)

    def _encode(self, chunk: int, value_C: Tensor) -> None:
        start, stop = self.chunks.bounds[chunk]
        residual_C = None
        if self.residual_N is not None:
            residual_C = self.residual_N[start:stop]
        buffer = self.slots[chunk][: self.chunks.formats[chunk].size_bytes]
        if self.lossless:
            value_C = (value_C / self.unit).to(self.grad_N.dtype)
            if residual_C is not None:
                residual_C.div_(self.unit)
        codec = self.chunks.codecs[chunk]
        state = self.states[chunk]
        payload, self.states[chunk] = codec.encode(
            state, value_C, residual_N=residual_C, buffer=buffer
        )
        self.sizes[chunk] = payload.size_bytes
        if self.lossless and residual_C is not None:
            residual_C.mul_(self.unit)

    def _decode(self, chunk: int, out_N: Tensor) -> None:
        start, stop = self.chunks.bounds[chunk]
        scale = self.unit / self.me.world
        codec = self.chunks.codecs[chunk]
        codec.decode(self.payload(chunk), out_N[start:stop], scale=scale)


EXAMPLES = (casync_ring(),)
