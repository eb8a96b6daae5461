"""SparCML: recursive doubling; partners exchange all they hold, and add it up.

Source: SparCML (Renggli et al., SC 2019), SSAR_Recursive_double, with its switch to a
    dense representation; Hierarchical Centralization of ZEN (OSDI 2025, definition 7).
Differences: any number of ranks. Let P be the largest power of two that is at most W:
    rank P + i gives what it took to rank i before the stages, and gets the sum from it
    after them. Each message is dense where that is smaller, by what it holds. Partners
    add the lower rank's sum first, so both hold the same bits. Partial sums travel in
    the working dtype.
Wire: a message of k units is 8 bytes that tell k, and then min((4 + v) k, v U) bytes
    rounded up to 8, with v = width * itemsize and U units in all. A rank below P sends
    one in each of log2 P stages, of what 2^stage ranks took together, and one more if
    it serves a rank above; that sends one.
State: the codec's.
Contributed: the encoded gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.collective.steps.ordered_sums import (
    asked_of,
    expected_union,
    merged_entries,
    num_entries,
)
from gradwire.contract import Compressor, Layout, Member, Residual, Selection, State
from gradwire.contract.collective import Collective, Dimensions, Needs
from gradwire.contract.payload import Payload
from gradwire.contract.spec import TensorSpec, working_dtype
from gradwire.contract.verbs import Recv, Send, Steps, Verb
from gradwire.kernels.sparse.entries import Entries, Part, num_units
from gradwire.kernels.sparse.format import SparseFormat
from gradwire.kernels.sparse.formats.coo import coo
from gradwire.kernels.sparse.formats.dense import dense


class WholeForm(NamedTuple):
    """The form of a whole gradient, which all ranks know before any value."""

    num_units: int
    width: int
    dtype: torch.dtype

    def form(self, count: int) -> SparseFormat:
        """The smaller of COO and dense."""
        sizes = {
            form: form.layout(count, *self).size_bytes for form in (coo(), dense())
        }
        return min(sizes, key=lambda form: sizes[form])

    def payload(self, buffer: Tensor, count: int) -> Payload:
        """A payload of so many units at the front of ``buffer``."""
        layout = self.form(count).layout(count, *self)
        return Payload(layout, buffer[: layout.size_bytes])

    def slot_bytes(self, count: int) -> int:
        """The room for so many units."""
        return self.form(count).layout(count, *self).slot_bytes

    def expected(self, taken: int, num_ranks: int) -> int:
        """How many units so many ranks take together that take as many each,
        independently.
        """
        return round(
            expected_union(min(taken, self.num_units), self.num_units, num_ranks)
        )


@dataclass(frozen=True, kw_only=True)
class sparcml(Collective):
    """Recursive doubling of sparse sums, dense once that is smaller."""

    needs: ClassVar[Needs] = Needs(layouts=(Layout.SPARSE,))
    exact_size: ClassVar[bool] = False
    dimensions: ClassVar[Dimensions] = Dimensions(
        "hierarchy", "incremental", "centralization", balance=None
    )

    def run(
        self,
        codec: Compressor,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual,
    ) -> Steps[State]:
        codec = me.variant_of(codec)
        spec = TensorSpec.of(grad_N)
        form = codec.format(spec)
        whole = self.whole(codec, spec)
        room = me.scratch("own", form.slot_bytes, grad_N, torch.uint8)[
            : form.size_bytes
        ]
        payload, state = yield me.encoding(codec, state, grad_N, residual_N, room)
        sums = _Held(me, whole, num_entries(form), out_N)
        yield me.sized(
            "pack",
            lambda: sums.take(codec, payload),
            spec.numel,
            lambda: sums.expect(1),
        )
        yield from _talk(me, sums)
        yield me.sized("decode", lambda: sums.write(out_N), spec.numel)
        me.selection = Selection(
            asked_of(codec, spec.numel),
            min(num_entries(payload.format) * whole.width, spec.numel),
            min(sums.count * whole.width, spec.numel),
        )
        return state

    def whole(self, codec: Compressor, spec: TensorSpec) -> WholeForm:
        """The ``WholeForm`` of a gradient under this codec."""
        return WholeForm(
            num_units(spec.numel, codec.width), codec.width, working_dtype(spec.dtype)
        )


@lru_cache(maxsize=256)
def groups(world: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The ranks whose entries each rank's sum holds: at first its own, then stage by
    stage.

    Entry 0 has a group a rank, the others one for each rank below P. The last has all
    ranks.

    >>> groups(3)
    (((0,), (1,), (2,)), ((0, 2), (1,)), ((0, 1, 2), (0, 1, 2)))
    """
    below = 1 << (world.bit_length() - 1)
    levels: list[tuple[tuple[int, ...], ...]] = [
        tuple((rank,) for rank in range(world))
    ]
    for stage in range(below.bit_length()):
        of_block: dict[int, list[int]] = {}
        for rank in range(world):
            of_block.setdefault(rank % below >> stage, []).append(rank)
        levels.append(tuple(tuple(of_block[rank >> stage]) for rank in range(below)))
    return tuple(levels)


class _Held:
    """A rank's sum so far: ``count`` units, as the payload that it sends next."""

    def __init__(
        self, me: Member, whole: WholeForm, num_taken: int, like: Tensor
    ) -> None:
        self.me = me
        self.whole = whole
        self.like = like
        self.num_taken = num_taken
        """The number of units that each rank takes, in a simulation."""
        self.num_ranks = 1
        self.hold(0, like.new_empty(0, dtype=torch.uint8))

    def hold(self, count: int, room: Tensor) -> None:
        """Holds so many units, which lie in ``room``."""
        self.count = count
        self.room = room

    def slot(self, name: str, count: int) -> Tensor:
        """New room for a message of so many units, "held" or "landed"; its content is
        undefined.
        """
        size_bytes = self.whole.slot_bytes(count)
        return self.me.scratch(name, size_bytes, self.like, torch.uint8, varies=True)

    def expect(self, num_ranks: int) -> None:
        """Holds what so many ranks take together, in a simulation."""
        count = self.whole.expected(self.num_taken, num_ranks)
        self.hold(count, self.slot("held", count))
        self.num_ranks = num_ranks

    def take(self, codec: Compressor, payload: Payload) -> None:
        """Holds what this rank's own payload has."""
        entries = Entries(*codec.entries(payload), codec.width)
        self.pack(_scaled(entries, 1 / self.me.world, self.whole.dtype))

    def merge(self, landed: Tensor, count: int, *, is_lower: bool) -> Entries:
        """The sum of what it holds and what landed; the lower rank's is added first."""
        entries = self._entries(self.room, self.count)
        theirs = self._entries(landed, count)
        both = (entries, theirs) if is_lower else (theirs, entries)
        return merged_entries(self.me, both, self.whole.num_units, self.whole.dtype)

    def pack(self, entries: Entries) -> None:
        """Holds these, as the payload that is sent next."""
        self.hold(entries.num, self.slot("held", entries.num))
        room = self.whole.payload(self.room, self.count)
        self.whole.form(self.count).encode(entries, self.whole.num_units, room.buffer)

    def write(self, out_N: Tensor) -> None:
        """Writes the sum into the dense vector."""
        payload = self.whole.payload(self.room, self.count)
        form = self.whole.form(self.count)
        part = Part(self.whole.num_units)
        form.scatter(payload, part, out_N.zero_(), width=self.whole.width)

    def _entries(self, buffer: Tensor, count: int) -> Entries:
        form = self.whole.form(count)
        payload = self.whole.payload(buffer, count)
        return form.decode(payload, self.whole.num_units, self.whole.width)


def _scaled(entries: Entries, factor: float, dtype: torch.dtype) -> Entries:
    """The entries with all values multiplied in ``dtype``; in place where they are of
    that.
    """
    values = entries.values
    if values.dtype == dtype:
        scaled = values.mul_(factor)
    else:
        scaled = values.to(dtype).mul_(factor)
    return entries._replace(values=scaled)


def _talk(me: Member, sums: _Held) -> Steps[None]:
    """Folds the ranks from P on into those below, doubles, and unfolds."""
    levels = groups(me.world)
    below = len(levels[1])
    has_guest = me.rank < me.world - below
    if me.rank >= below:
        yield from _swap(me, sums, me.rank - below, receives=False)
        yield from _swap(me, sums, me.rank - below, sends=False)
        return
    if has_guest:
        yield from _swap(
            me, sums, me.rank + below, sends=False, adds=levels[1][me.rank]
        )
    for stage, level in enumerate(levels[2:]):
        yield from _swap(me, sums, me.rank ^ 1 << stage, adds=level[me.rank])
    if has_guest:
        yield from _swap(me, sums, me.rank + below, receives=False)


def _swap(
    me: Member,
    sums: _Held,
    peer: int,
    *,
    sends: bool = True,
    receives: bool = True,
    adds: Sequence[int] = (),
) -> Steps[None]:
    """Sends what is held, receives what the peer holds, or both: sizes first.

    What came makes a sum with what is held, of the ranks ``adds``; without them it
    takes its place.
    """
    own_1 = me.announced("own count", 1).fill_(sums.count)
    announced_1 = me.announced("announced count", 1)
    yield _verbs(peer, own_1 if sends else None, announced_1 if receives else None)
    count = 0
    landed = None
    if receives:
        there = me.world
        if adds:
            there = len(adds) - sums.num_ranks
        [count] = me.sizes(
            announced_1,
            [sums.whole.num_units],
            unit="units",
            ranks=[peer],
            usual=[sums.whole.expected(sums.num_taken, there)],
        )
        landed = sums.slot("landed" if adds else "held", count)
    yield _verbs(peer, sums.room if sends else None, landed)
    if landed is None:
        return
    if adds:
        numel = sums.whole.num_units * sums.whole.width
        total = yield me.sized(
            "merge",
            lambda: sums.merge(landed, count, is_lower=me.rank < peer),
            numel,
        )
        yield me.sized(
            "pack", lambda: sums.pack(total), numel, lambda: sums.expect(len(adds))
        )
    else:
        sums.hold(count, landed)


def _verbs(peer: int, sent: Tensor | None, landed: Tensor | None) -> tuple[Verb, ...]:
    verbs: list[Verb] = [] if sent is None else [Send(peer, sent)]
    return (*verbs, *([] if landed is None else [Recv(peer, landed)]))


EXAMPLES = (sparcml(),)
