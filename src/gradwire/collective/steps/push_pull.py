"""Push and pull: each rank sends every server its part, the server merges, everyone
gets the sums.

The schemes of ZEN's *parallelism* share it (section 2.2). W ranks are workers and
servers alike.

Differences: servers sit with the workers, so a rank's own part does not travel. Pushes
    go straight to their servers (``rounds``). Pulls are an all-gather, padded to the
    largest, as the busiest server would send the others as many bytes one by one. (8
    hosts at 200 Mbit gathered 360 kB each in 115 ms that way and in 155 ms by threes;
    101 ms are the bytes.)
Wire: a rank sends, each payload rounded up to 8 bytes,
    - 8 (W-1), the units that it pushes to each server;
    - the sum over the others j of PUSH(units pushed to j);
    - 32 (W-1), the counts that it merged and pushed;
    - (W-1) * max over ranks of PULL(units merged there), or the bytes of the scheme's
      own ``delivery``.
    PUSH and PULL are the scheme's; by default COO(k) = (4 + width * itemsize) k.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...contract import (
    Compressor,
    Imbalance,
    Layout,
    Member,
    Residual,
    Selection,
    State,
)
from ...contract.collective import Collective, Needs
from ...contract.payload import Format, Payload
from ...contract.spec import TensorSpec, working_dtype
from ...contract.verbs import AllGather, Compute, Steps, Verb
from ...kernels.sparse.entries import Entries, Part, Parts, num_units, parts_of
from ...kernels.sparse.format import SparseFormat
from ...kernels.sparse.formats.coo import coo
from ...kernels.sparse.partition import partition
from ...kernels.sparse.permutation import Permutation
from ...kernels.sparse.scatter import scatter_entries
from .ordered_sums import (
    Packed,
    asked_of,
    cleared,
    decoded,
    expected_union,
    merged_entries,
    num_entries,
    split,
    value_dtype,
)
from .rounds import to_each
from .sizes import announced_each

# ---- Cuts of gradients into parts, and the payloads of parts -------------------------
#
# All that is known before any value.


@dataclass(frozen=True)
class Cut:
    """A gradient's parts and the dtypes they travel in: known before any value."""

    numel: int
    width: int
    """Elements of a unit."""
    parts: tuple[Part, ...]
    pushed_dtype: torch.dtype
    pulled_dtype: torch.dtype
    """The gradient's own: sums in the working dtype are rounded to it once."""
    is_listed: bool = False
    """Pulls must tell which units there are, as the dense format does not."""

    @property
    def num_units(self) -> int:
        return self.parts[0].num_units

    @property
    def permutation(self) -> Permutation | None:
        return self.parts[0].permutation

    @property
    def sum_dtype(self) -> torch.dtype:
        return working_dtype(self.pulled_dtype)

    def pushed(self, form: SparseFormat, server: int, count: int) -> Format:
        """The payload of so many units on their way to a server."""
        return form.layout(
            count, self.parts[server].length, self.width, self.pushed_dtype
        )

    def pulled(self, form: SparseFormat, rank: int, count: int) -> Format:
        """The payload of so many units that ``rank`` merged."""
        return form.layout(
            count, self.parts[rank].length, self.width, self.pulled_dtype
        )


@lru_cache(maxsize=256)
def cached_parts(
    num_units: int, world: int, permutation: Permutation | None
) -> tuple[Part, ...]:
    """``parts_of``; their permutation has constants that are worked out once."""
    return parts_of(num_units, world, permutation)


# ---- How sums travel in a pull -------------------------------------------------------


class Delivery(NamedTuple):
    """The way of a rank's sums to all others, and of theirs to it."""

    own: Tensor
    """Room for this rank's sums as they are written, uint8."""
    received: list[Tensor]
    """The sums that each rank has written, in rank order, once ``verbs`` are done."""
    verbs: tuple[Verb, ...]
    """They may run at once."""


def gathered(me: Member, sizes: Sequence[int], like: Tensor) -> Delivery:
    """An all-gather of sums of so many bytes a rank, each padded to the largest."""
    # What was pushed has been merged by now, so sums travel in its room.
    size = max(sizes)
    own_sums = me.scratch("pushed", size, like, torch.uint8, varies=True)
    whole = me.scratch("arrived", me.world * size, like, torch.uint8, varies=True)
    return Delivery(
        own_sums, split(whole, [size] * me.world), (AllGather(whole, own_sums),)
    )


# ---- The push ------------------------------------------------------------------------
#
# Every rank sends every other one entries of the part that the other one serves.
#
# Wire: 8 (W-1) bytes that tell how many units follow, then the payloads, each rounded
# up to 8 bytes.


def push(
    me: Member,
    sent: Sequence[Tensor],
    counts: Sequence[int],
    form_of: Callable[[int], tuple[SparseFormat, Format]],
    limit: int,
    *,
    beside: Compute,
    like: Tensor,
) -> Steps[list[Packed]]:
    """Sends rank i the slot ``sent[i]`` of ``counts[i]`` units; returns all sent.

    The messages are in rank order, this rank's own among them. ``form_of`` says how so
    many units of this rank's part are written. There are at most ``limit`` of them.
    ``beside`` is done while the network is busy. ``like`` is on the device of the
    payloads.
    """
    announced_W = yield from announced_each(me, counts)
    usual = [counts[me.rank]] * me.world
    announced = me.sizes(announced_W, [limit] * me.world, unit="units", usual=usual)
    forms = [form_of(count) for count in announced]
    slots = [layout.slot_bytes for _, layout in forms]
    arrived = split(
        me.scratch("arrived", sum(slots), like, torch.uint8, varies=True), slots
    )
    arrived[me.rank] = sent[me.rank]
    yield from to_each(me, sent, arrived, beside=beside)
    return [
        Packed(form, Payload(layout, slot[: layout.size_bytes]))
        for (form, layout), slot in zip(forms, arrived, strict=True)
    ]


# ---- push and pull -------------------------------------------------------------------


_NUM_COUNTS = 4
"""Numbers that a rank announces when it has merged: see ``MergeCounts``."""


class MergeCounts(NamedTuple):
    """The numbers that a rank announces when it has merged its part."""

    merged: int
    """The number of units in this rank's part of the mean."""
    arrived: int
    """The number of elements in these units that some rank took."""
    pushed: int
    """The number of units that this rank pushed, its own part's included."""
    most: int
    """The number of units that this rank pushed to the part that got most."""


class PushPull(Collective):
    """Schemes differ in a unit's place, in a unit's form and in a pull's form."""

    needs: ClassVar[Needs] = Needs(layouts=(Layout.SPARSE,))
    exact_size: ClassVar[bool] = False
    carries_rows: ClassVar[bool] = True

    def permutation(self, num_units: int) -> Permutation | None:
        """The permutation of units among places.

        None where parts are ranges of units.
        """
        return None

    def width(self, codec: Compressor) -> int:
        """Elements of a unit that travels."""
        return codec.width

    def units(self, me: Member, entries: Entries, numel: int) -> Entries:
        """The units that travel for what a codec took."""
        return entries

    def arrived(self, merged: Entries) -> int:
        """How many of the merged elements some rank took."""
        return merged.num * merged.width

    def push_format(self, cut: Cut, server: int, count: int) -> SparseFormat:
        """How so many units are written for a server.

        This follows from what it and the sender know.
        """
        return coo()

    def pull_format(self, cut: Cut, rank: int, count: int) -> SparseFormat:
        """How ``rank`` writes so many units for the others.

        This follows from what all ranks know.
        """
        return coo()

    def delivery(self, me: Member, sizes: Sequence[int], like: Tensor) -> Delivery:
        """The verbs that carry sums of so many bytes a rank, with room for them."""
        return gathered(me, sizes, like)

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
        residual_N: Residual,
    ) -> Steps[State]:
        codec = me.variant_of(codec)
        spec = TensorSpec.of(grad_N)
        cut = self.cut(codec, spec, me.world)
        form = codec.format(spec)
        buffer = me.scratch("own", form.slot_bytes, grad_N, torch.uint8)[
            : form.size_bytes
        ]
        payload, state = yield me.encoding(codec, state, grad_N, residual_N, buffer)
        usual = self.usual(cut, codec, spec)
        sent, counts = yield me.sized(
            "partition",
            lambda: self._partition(codec, me, cut, payload, spec.numel),
            spec.numel,
            lambda: (self._slots(me, cut, usual[0], grad_N), usual[0]),
        )
        is_all = codec.traits.lossless and residual_N is None
        clear = me.sized(
            "clear",
            lambda: cleared(me, codec, payload if is_all else None, grad_N, out_N),
            spec.numel,
        )
        form_of = partial(self.pushed, cut, me.rank)
        most = cut.parts[me.rank].length
        arrived = yield from push(
            me, sent, counts, form_of, most, beside=clear, like=out_N
        )
        sums, announced = yield from self.merge(me, cut, arrived, counts, usual)

        def put(rank: int, entries: Entries) -> None:
            scatter_entries(entries, cut.parts[rank], out_N)

        yield from self.pull(me, cut, sums, announced, out_N, put)
        return state

    def _partition(
        self, codec: Compressor, me: Member, cut: Cut, payload: Payload, numel: int
    ) -> tuple[list[Tensor], list[int]]:
        """The slot for each server, and how many units each holds."""
        taken = Entries(*codec.entries(payload), codec.width)
        me.selection = Selection(
            asked_of(codec, numel), min(taken.num * codec.width, numel), 0
        )
        units = self.units(me, taken, numel)
        return self.spread(
            me, cut, units._replace(values=units.values.to(cut.pushed_dtype))
        )

    def spread(
        self, me: Member, cut: Cut, units: Entries
    ) -> tuple[list[Tensor], list[int]]:
        """The slot for each server, and how many of the units each holds."""
        places_K = me.thread_scratch("places", units.num, units.values, torch.int32)
        size = units.values.numel()
        dtype = units.values.dtype
        values = me.thread_scratch("values", size, units.values, dtype)
        room = Entries(places_K, values, units.width)
        parts = self.grouped(cut, units, room)
        slots = self._slots(me, cut, parts.counts_W, units.values)
        for rank, (slot, count) in enumerate(zip(slots, parts.counts_W, strict=True)):
            form, layout = self.pushed(cut, rank, count)
            form.encode(
                parts.of(rank), cut.parts[rank].length, slot[: layout.size_bytes]
            )
        return slots, list(parts.counts_W)

    def grouped(self, cut: Cut, units: Entries, room: Entries) -> Parts:
        """The units by server, in ``room``."""
        world = len(cut.parts)
        return partition(units, cut.num_units, world, cut.permutation, room=room)

    def summed(self, me: Member, cut: Cut, ranks: Sequence[Entries]) -> Entries:
        """The mean of this rank's part, by ascending place."""
        length = cut.parts[me.rank].length
        return merged_entries(me, ranks, length, cut.sum_dtype, 1 / me.world)

    def _slots(
        self, me: Member, cut: Cut, counts: Sequence[int], like: Tensor
    ) -> list[Tensor]:
        """Room for the payload of each server, of so many units."""
        sizes = [
            self.pushed(cut, rank, k)[1].slot_bytes for rank, k in enumerate(counts)
        ]
        return split(
            me.scratch("pushed", sum(sizes), like, torch.uint8, varies=True), sizes
        )

    def merge(
        self,
        me: Member,
        cut: Cut,
        arrived: list[Packed],
        counts: list[int],
        usual: tuple[list[int], list[int]],
    ) -> Steps[tuple[Entries | None, list[MergeCounts]]]:
        """Adds up, in rank order, what arrived.

        Returns the sums and what every rank announced.
        """
        length = cut.parts[me.rank].length

        def merge() -> tuple[Entries | None, MergeCounts]:
            ranks = decoded(me, arrived, [length] * me.world, cut.width)
            sums = self.summed(me, cut, ranks)
            return sums, MergeCounts(
                sums.num, self.arrived(sums), sum(counts), max(counts)
            )

        pushed, union = usual
        usually = [
            MergeCounts(n, n * cut.width, sum(pushed), max(pushed)) for n in union
        ]
        sums, own_counts = yield me.sized(
            "merge", merge, cut.numel, lambda: (None, usually[0])
        )
        own_T = me.announced("own announced", _NUM_COUNTS).copy_(
            torch.tensor(own_counts, device="cpu")
        )
        announced_WT = me.announced("announced", _NUM_COUNTS * me.world)
        yield AllGather(announced_WT, own_T)
        limits = [
            n
            for part in cut.parts
            for n in (part.length, part.length * cut.width, *_UNLIMITED)
        ]
        flat = me.sizes(
            announced_WT,
            limits,
            unit="units",
            ranks=[rank for rank in range(me.world) for _ in range(_NUM_COUNTS)],
            usual=[number for merge_counts in usually for number in merge_counts],
        )
        announced = [
            MergeCounts(*flat[i : i + _NUM_COUNTS])
            for i in range(0, len(flat), _NUM_COUNTS)
        ]
        _note(me, cut, announced)
        return sums, announced

    def pull(
        self,
        me: Member,
        cut: Cut,
        sums: Entries | None,
        announced: list[MergeCounts],
        like: Tensor,
        put: Callable[[int, Entries], None],
    ) -> Steps[None]:
        """Writes the own sums for all others, and calls ``put`` for each rank's."""
        forms = [
            self.pull_format(cut, rank, counts.merged)
            for rank, counts in enumerate(announced)
        ]
        layouts = [
            cut.pulled(form, rank, counts.merged)
            for rank, (form, counts) in enumerate(zip(forms, announced, strict=True))
        ]
        own_room, received, verbs = self.delivery(
            me, [layout.slot_bytes for layout in layouts], like
        )

        def pack() -> Entries:
            assert sums is not None
            rounded = sums._replace(values=sums.values.to(cut.pulled_dtype))
            room = own_room[: layouts[me.rank].size_bytes]
            forms[me.rank].encode(rounded, cut.parts[me.rank].length, room)
            return rounded

        own_numel = cut.parts[me.rank].length * cut.width
        mine = yield me.sized("pack", pack, own_numel)

        def decode() -> None:
            others = [rank for rank in range(me.world) if rank != me.rank]
            messages = [
                Packed(
                    forms[r], Payload(layouts[r], received[r][: layouts[r].size_bytes])
                )
                for r in others
            ]
            lengths = [cut.parts[rank].length for rank in others]
            for rank, entries in zip(
                others, decoded(me, messages, lengths, cut.width), strict=True
            ):
                put(rank, entries)

        # Its own part a rank has: that is put while the others' travel.
        ready = cut.parts[me.rank].length * cut.width
        yield (*verbs, me.sized("decode", lambda: put(me.rank, mine), ready))
        yield me.sized("decode", decode, cut.numel - ready)

    def usual(
        self, cut: Cut, codec: Compressor, spec: TensorSpec
    ) -> tuple[list[int], list[int]]:
        """Units that each rank pushes to each server and each merges, in predictions.

        Those of a payload as ``codec.format`` has it, spread evenly; ranks take units
        independently of each other, so that W of them take N (1 - (1 - K / N)^W).
        """
        world = len(cut.parts)
        total = cut.num_units
        entries: float = num_entries(codec.format(spec))
        # Larger units than the codec's are taken once, however many of their entries
        # are.
        taken = (
            entries
            if cut.width == codec.width
            else expected_union(1, total, int(entries))
        )
        union = expected_union(min(taken, total), total, world)
        share = [part.length / total if total else 0.0 for part in cut.parts]
        return [round(taken * fraction) for fraction in share], [
            round(union * fraction) for fraction in share
        ]

    def pushed(self, cut: Cut, server: int, count: int) -> tuple[SparseFormat, Format]:
        """The format of so many units on their way to a server, and their layout."""
        form = self.push_format(cut, server, count)
        return form, cut.pushed(form, server, count)


_UNLIMITED = (2**62, 2**62)
"""Limits of ``pushed`` and ``most``, which are for statistics, not for memory."""


def _note(me: Member, cut: Cut, announced: Sequence[MergeCounts]) -> None:
    """Keeps this step's spread of entries (definition 8) and arrived elements."""
    union = sum(counts.merged for counts in announced)
    push = max(counts.most / max(1, counts.pushed) for counts in announced)
    pull = max(counts.merged for counts in announced) / max(1, union)
    me.imbalance = Imbalance(me.world * push, me.world * pull)
    if me.selection is not None:
        arrived = min(sum(counts.arrived for counts in announced), cut.numel)
        me.selection = me.selection._replace(arrived=arrived)
