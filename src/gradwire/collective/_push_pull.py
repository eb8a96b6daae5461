"""Push and pull: each rank sends every server its part, the server merges, everyone gets the sums.

What the schemes of ZEN's *parallelism* share (section 2.2). W ranks are workers and servers alike.
Differences: servers sit with the workers, so a rank's own part does not travel. Pushes go straight
    to their servers (``_rounds``); pulls are an all-gather, padded to the largest, which is what
    the busiest server would send the others one by one. (8 hosts at 200 Mbit gathered 360 kB each
    in 115 ms that way and in 155 ms by threes; 101 ms are the bytes.)
Wire: a rank sends, each payload rounded up to 8 bytes,
    8 (W-1)                         how many units it pushes to each
    sum over the others j of COO(units pushed to j)
    32 (W-1)                        what it merged and pushed
    (W-1) * max over ranks of PULL(units merged there)
    with COO(k) = (4 + width * itemsize) k, and PULL as the scheme says. ``sent_bytes`` is that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import Compressor, Imbalance, Layout, Member, Selection, State
from ..hollow import Hollow
from ..payload import Format, Payload
from ..sparse.entries import Entries, num_units
from ..sparse.formats._types import SparseFormat
from ..sparse.formats.coo import coo
from ..sparse.merge import Accumulator
from ..sparse.partition import coo_slots_bytes, partition_into_coo
from ..sparse.permutation import Permutation
from ..spec import TensorSpec
from ._cut import Cut as Cut
from ._cut import cached_parts
from ._entries import (
    accumulator,
    encode_sums,
    expected_union,
    num_entries,
    scaled,
    split,
    value_dtype,
)
from ._rounds import to_each
from ._selection import asked_of
from ._sizes import SIZE_BYTES
from ._types import Collective, Needs
from ._verbs import AllGather, AllToAll, Compute, Steps

_TOLD = 4
"""Numbers that a rank tells all others when it has merged: see ``Told``."""


class Told(NamedTuple):
    """What a rank tells all others when it has merged its part."""

    merged: int
    """Units, of all ranks together."""
    arrived: int
    """Elements in them that some rank took."""
    pushed: int
    """Units that this rank pushed, its own part's included."""
    most: int
    """Of these, units of one part."""


class PushPull(Collective):
    """Schemes differ in where a unit's place is, in what a unit is and in how pulls are written."""

    needs: ClassVar[Needs] = Needs(layout=Layout.SPARSE)
    exact_size: ClassVar[bool] = False

    def permutation(self, num_units: int) -> Permutation | None:
        """Where units lie; None leaves them where they are, and parts are ranges."""
        return None

    def width(self, codec: Compressor) -> int:
        """Elements of a unit that travels."""
        return codec.width

    def units(self, me: Member, entries: Entries, numel: int) -> Entries:
        """The units that travel for what a codec took."""
        return entries

    def unit_indices(self, codec: Compressor, indices_K: Tensor) -> Tensor:
        """The indices of ``units``, ascending."""
        return indices_K

    def arrived(self, merged: Accumulator, count: int) -> int:
        """How many elements some rank took of those that were merged."""
        return count * merged.width

    def pull_format(self, cut: Cut, rank: int, count: int) -> SparseFormat:
        """How ``rank`` writes so many units for the others; from what all ranks know."""
        return coo()

    def cut(self, codec: Compressor, spec: TensorSpec, world: int) -> Cut:
        """The parts of a gradient under this codec."""
        width = self.width(codec)
        units = num_units(spec.numel, width)
        parts = cached_parts(units, world, self.permutation(units))
        return Cut(spec.numel, width, parts, value_dtype(codec, spec), spec.dtype)

    def run(
        self,
        codec: Compressor,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None,
    ) -> Steps[State]:
        codec = me.variant_of(codec)
        spec = TensorSpec("", grad_N.numel(), grad_N.dtype)
        cut, form = self.cut(codec, spec, me.world), codec.format(spec)
        own = me.scratch("own", form.slot_bytes, grad_N, torch.uint8)[: form.size_bytes]
        payload, state = yield Compute(
            "encode",
            lambda: codec.encode(state, grad_N, residual_N=residual_N, buffer=own),
            spec.numel,
        )
        usual = self.usual(cut, codec, spec)
        sent, counts = yield me.sized(
            "partition",
            lambda: self._partition(codec, me, cut, payload, spec.numel),
            spec.numel,
            lambda: _usual_parts(me, cut, usual, grad_N),
        )
        arrived = yield from push(me, cut, sent, counts, out_N)
        total, told = yield from self.merge(me, cut, arrived, counts, usual, out_N)

        def put(rank: int, form: SparseFormat, payload: Payload) -> None:
            form.scatter(payload, cut.parts[rank], out_N, width=cut.width)

        yield from self.pull(me, cut, total, told, out_N, put)
        return state

    def _partition(
        self, codec: Compressor, me: Member, cut: Cut, payload: Payload, numel: int
    ) -> tuple[list[Tensor], list[int]]:
        """The slot for each server, and how many units each holds."""
        taken = Entries(*codec.entries(payload), codec.width)
        me.selection = Selection(asked_of(codec, numel), min(taken.num * codec.width, numel), 0)
        units = self.units(me, taken, numel)
        return spread(me, cut, units._replace(values=units.values.to(cut.pushed_dtype)))

    def merge(
        self,
        me: Member,
        cut: Cut,
        arrived: list[Payload],
        counts: list[int],
        usual: tuple[list[int], list[int]],
        out_N: Tensor,
    ) -> Steps[tuple[Accumulator, list[Told]]]:
        """Adds up, in rank order, what arrived; returns the sums and what every rank told."""
        length = cut.parts[me.rank].length
        total = accumulator(me, length, cut.width, cut.sum_dtype, out_N)

        def merge() -> Told:
            for payload in arrived:
                taken = coo().decode(payload, cut.num_units, cut.width)
                total.add(scaled(taken, 1 / me.world, cut.sum_dtype))
            count = total.count
            return Told(count, self.arrived(total, count), sum(counts), max(counts))

        pushed, merged = usual
        usually = [Told(n, n * cut.width, sum(pushed), max(pushed)) for n in merged]
        own = yield me.sized("merge", merge, cut.numel, lambda: usually[0])
        own_T = me.scratch("own told", _TOLD, out_N, torch.int64).copy_(torch.tensor(own))
        told_WT = me.scratch("told", _TOLD * me.world, out_N, torch.int64)
        yield AllGather(told_WT, own_T)
        limits = [
            n for part in cut.parts for n in (part.length, part.length * cut.width, *_UNLIMITED)
        ]
        flat = me.sizes(
            told_WT,
            limits,
            unit="units",
            ranks=[rank for rank in range(me.world) for _ in range(_TOLD)],
            usual=[number for one in usually for number in one],
        )
        told = [Told(*flat[i : i + _TOLD]) for i in range(0, len(flat), _TOLD)]
        _note(me, cut, told)
        return total, told

    def pull(
        self,
        me: Member,
        cut: Cut,
        total: Accumulator,
        told: list[Told],
        like: Tensor,
        put: Callable[[int, SparseFormat, Payload], None],
    ) -> Steps[None]:
        """Writes the own sums for all others, and calls ``put`` for those of each rank."""
        forms = [self.pull_format(cut, rank, one.merged) for rank, one in enumerate(told)]
        layouts = [
            cut.pulled(form, rank, one.merged)
            for rank, (form, one) in enumerate(zip(forms, told, strict=True))
        ]
        slot = max(layout.slot_bytes for layout in layouts)
        own = me.scratch("own pull", slot, like, torch.uint8, varies=True)
        whole = me.scratch("pulled", me.world * slot, like, torch.uint8, varies=True)
        mine = Payload(layouts[me.rank], own[: layouts[me.rank].size_bytes])
        yield me.sized(
            "encode",
            lambda: encode_sums(total, forms[me.rank], cut.pulled_dtype, mine),
            cut.parts[me.rank].length,
            lambda: None,
        )

        def decode() -> None:
            for rank, received in enumerate(split(whole, [slot] * me.world)):
                if rank != me.rank:
                    layout = layouts[rank]
                    put(rank, forms[rank], Payload(layout, received[: layout.size_bytes]))

        # Its own part a rank has: that is decoded while the others' travel.
        ready = cut.parts[me.rank].length * cut.width
        yield (
            AllGather(whole, own),
            me.sized("decode", lambda: put(me.rank, forms[me.rank], mine), ready, lambda: None),
        )
        yield me.sized("decode", decode, cut.numel - ready, lambda: None)

    def usual(self, cut: Cut, codec: Compressor, spec: TensorSpec) -> tuple[list[int], list[int]]:
        """Units that a rank pushes to each server, and that each merges, in predictions.

        Those of a payload as ``codec.format`` has it, spread evenly; ranks take units independently
        of each other, so that W of them take N (1 - (1 - K / N)^W).
        """
        world, total = len(cut.parts), cut.num_units
        entries: float = num_entries(codec.format(spec))
        # Larger units than the codec's are taken once, however many of their entries are.
        taken = entries if cut.width == codec.width else expected_union(1, total, int(entries))
        union = expected_union(min(taken, total), total, world)
        share = [part.length / total if total else 0.0 for part in cut.parts]
        return [round(taken * one) for one in share], [round(union * one) for one in share]

    def sent_bytes(
        self, cut: Cut, pushed_WW: Sequence[Sequence[int]], merged_W: Sequence[int]
    ) -> list[int]:
        """Bytes that each rank sends, by units pushed (worker, server) and units merged."""
        others = len(cut.parts) - 1
        pull = max(self._pull_layout(cut, r, k).slot_bytes for r, k in enumerate(merged_W))
        return [
            others * (SIZE_BYTES * (1 + _TOLD) + pull)
            + sum(cut.pushed(count).slot_bytes for to, count in enumerate(own) if to != rank)
            for rank, own in enumerate(pushed_WW)
        ]

    def volumes(
        self, codec: Compressor, spec: TensorSpec, taken: Sequence[Tensor]
    ) -> tuple[list[int], list[int]]:
        """Bytes of what each rank pushes, its own part included, and of each rank's pull."""
        cut, pushed, merged = self._counts(codec, spec, taken)
        pushes = [sum(cut.pushed(count).size_bytes for count in own) for own in pushed]
        return pushes, [self._pull_layout(cut, r, k).size_bytes for r, k in enumerate(merged)]

    def _counts(
        self, codec: Compressor, spec: TensorSpec, taken: Sequence[Tensor]
    ) -> tuple[Cut, list[list[int]], list[int]]:
        """Units by worker and server, and units that each server merges."""
        cut = self.cut(codec, spec, len(taken))
        return cut, *cut.counts([self.unit_indices(codec, indices_K) for indices_K in taken])

    def _pull_layout(self, cut: Cut, rank: int, count: int) -> Format:
        return cut.pulled(self.pull_format(cut, rank, count), rank, count)

    def bytes_of(
        self, codec: Compressor, spec: TensorSpec, taken: Sequence[Tensor]
    ) -> list[int] | None:
        return self.sent_bytes(*self._counts(codec, spec, taken))

    def wire_bytes(self, codec: Compressor, spec: TensorSpec, world: int) -> list[int]:
        codec = codec.for_world(world)
        cut = self.cut(codec, spec, world)
        most = num_entries(codec.format(spec))
        pushed = [min(most, part.length) for part in cut.parts]
        merged = [min(world * most, part.length) for part in cut.parts]
        return self.sent_bytes(cut, [pushed] * world, merged)

    def expected_bytes(self, codec: Compressor, spec: TensorSpec, world: int) -> list[int]:
        typical = Hollow(codec.for_world(world))
        cut = self.cut(typical, spec, world)
        pushed, merged = self.usual(cut, typical, spec)
        return self.sent_bytes(cut, [pushed] * world, merged)


_UNLIMITED = (2**62, 2**62)
"""What a rank tells of its own pushes is for statistics alone; nobody's memory depends on it."""


def _usual_parts(
    me: Member, cut: Cut, usual: tuple[list[int], list[int]], like: Tensor
) -> tuple[list[Tensor], list[int]]:
    """What ``_partition`` returns, in a simulation."""
    counts, _ = usual
    slots = [cut.pushed(count).slot_bytes for count in counts]
    return split(me.scratch("pushed", sum(slots), like, torch.uint8), slots), counts


def spread(me: Member, cut: Cut, units: Entries) -> tuple[list[Tensor], list[int]]:
    """The slot for each server, and how many of the units each holds."""
    room = coo_slots_bytes(units, me.world)
    buffer = me.scratch("pushed", room, units.indices_K, torch.uint8, varies=True)
    payloads = partition_into_coo(units, cut.num_units, me.world, cut.permutation, buffer=buffer)
    counts = [payload["indices"].numel() for payload in payloads]
    return split(buffer, [cut.pushed(count).slot_bytes for count in counts]), counts


def push(
    me: Member, cut: Cut, sent: list[Tensor], counts: list[int], out_N: Tensor
) -> Steps[list[Payload]]:
    """Sends every server its part; returns what all ranks pushed here, in rank order.

    The gradient has been read by now, so ``out_N``, which may be the same tensor, is cleared while
    the network is busy.
    """
    own_W = me.scratch("own counts", me.world, out_N, torch.int64).copy_(torch.tensor(counts))
    told_W = me.scratch("told counts", me.world, out_N, torch.int64)
    one_each = (1,) * me.world
    yield AllToAll(told_W, own_W, one_each, one_each)
    limits, usual = [cut.parts[me.rank].length] * me.world, [counts[me.rank]] * me.world
    layouts = [cut.pushed(k) for k in me.sizes(told_W, limits, unit="units", usual=usual)]
    slots = [layout.slot_bytes for layout in layouts]
    whole = me.scratch("arrived", sum(slots), out_N, torch.uint8, varies=True)
    arrived = split(whole, slots)
    arrived[me.rank] = sent[me.rank]
    yield from to_each(me, sent, arrived, beside=Compute("clear", out_N.zero_, out_N.numel()))
    return [
        Payload(layout, slot[: layout.size_bytes])
        for layout, slot in zip(layouts, arrived, strict=True)
    ]


def _note(me: Member, cut: Cut, told: Sequence[Told]) -> None:
    """Keeps what this step's spread of entries was (definition 8) and how many elements arrived."""
    union = sum(one.merged for one in told)
    push = max(one.most / max(1, one.pushed) for one in told)
    pull = max(one.merged for one in told) / max(1, union)
    me.imbalance = Imbalance(me.world * push, me.world * pull)
    if me.selection is not None:
        arrived = min(sum(one.arrived for one in told), cut.numel)
        me.selection = me.selection._replace(arrived=arrived)
