"""Sums of regions, and the mean that all ranks make of them: a step behind the
selection.

Source: Ok-Topk (PPoPP 2022), algorithm 1: split and reduce, then balance and
allgatherv.
"""

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.collective.steps.ordered_sums import (
    Packed,
    decoded,
    merged_entries,
    split,
)
from gradwire.collective.steps.push_pull import push
from gradwire.contract import Member
from gradwire.contract.payload import Format, Payload
from gradwire.contract.spec import working_dtype
from gradwire.contract.verbs import AllGather, AllToAll, Steps
from gradwire.kernels.sparse.choose import smallest
from gradwire.kernels.sparse.entries import Entries, Part
from gradwire.kernels.sparse.format import SparseFormat
from gradwire.kernels.sparse.scatter import scatter_entries

from .regions import Regions, slots_of
from .spread import Spread
from .threshold import (
    FEWEST,
    MOST,
    SHARED,
    entries_at,
    entries_reaching,
    largest_entries,
    least,
)

_ANNOUNCED = 2
"""Numbers that a rank tells of its sums: how many there are, and how many reach the
threshold.
"""


class _Listed(NamedTuple):
    """The sums that are gathered."""

    counts: list[int]
    """How many each rank sends."""
    is_all: bool
    """All that there are, and not only those that reach the threshold."""
    is_exact: bool
    """The largest of them are the mean, and tell the threshold for the next step."""


class _List(NamedTuple):
    """How sums that travel together are written."""

    form: SparseFormat
    layout: Format
    length: int
    """The number of places that they are of."""
    first: int
    """The first of these places in the whole gradient."""


class Turn:
    """One rank's step behind the selection: the sums of its region, then the mean of
    all.
    """

    def __init__(
        self,
        me: Member,
        regions: Regions,
        asked: int,
        most_uneven: float,
        grad_N: Tensor,
        out_N: Tensor,
    ) -> None:
        self.me = me
        self.regions = regions
        self.asked = asked
        self.out_N = out_N
        self.most_uneven = most_uneven
        self.sum_dtype = working_dtype(grad_N.dtype)
        self.dtype = grad_N.dtype

    def reduce(self, taken: Entries) -> Steps[Entries]:
        """Sends each rank what lies in its region; returns the own region's sums over
        W.
        """
        me = self.me
        regions = self.regions
        shares = regions.shares(self.asked)
        sent, counts = yield me.sized(
            "encode",
            lambda: self._pack(regions.parts(taken)),
            taken.num,
            lambda: (self._slots(shares), shares),
        )
        clear = me.sized("decode", self.out_N.zero_, self.out_N.numel())
        length = regions.length(me.rank)
        form_of = partial(regions.form, me.rank, dtype=self.sum_dtype)
        arrived = yield from push(
            me, sent, counts, form_of, length, beside=clear, like=self.out_N
        )
        sums: Entries = yield me.sized(
            "merge",
            lambda: self._add(arrived),
            self.asked,
            lambda: no_entries(self.out_N, 0),
        )
        return sums

    def gather(self, sums: Entries, threshold: float) -> Steps[tuple[float, int]]:
        """Writes the mean: what of the sums reaches ``threshold``, or the largest if
        that is 0.

        Returns the threshold for the next step and how many elements arrived.
        """
        me = self.me
        regions = self.regions
        share = regions.shares(self.asked)[me.rank]
        chosen, announced = yield me.sized(
            "encode",
            lambda: self._choose(sums, threshold),
            self.asked,
            lambda: (sums, [share] * _ANNOUNCED),
        )
        listed = yield from self._agree(announced, threshold)
        spread = Spread.of(listed.counts, self.most_uneven)
        entries: Entries = yield me.sized(
            "encode",
            lambda: self._cut(
                sums if listed.is_all else chosen, listed.counts[me.rank]
            ),
            self.asked,
            lambda: no_entries(self.out_N, listed.counts[me.rank]),
        )
        # ranks take the same verbs, of no bytes where nothing moves
        if self.most_uneven < inf:
            entries = yield from self._even_out(entries, spread)
        lists = [self._list(rank, spread) for rank in range(me.world)]
        size = max(part.layout.slot_bytes for part in lists)
        room = me.scratch("own gather", size, self.out_N, torch.uint8, varies=True)
        whole = me.scratch(
            "gathered", me.world * size, self.out_N, torch.uint8, varies=True
        )

        def pack() -> None:
            form, layout, length, _ = lists[me.rank]
            form.encode(entries, length, room[: layout.size_bytes])

        def write() -> tuple[float, int]:
            arrived = self._joined(split(whole, [size] * me.world), lists)
            if not listed.is_exact:
                self._put(arrived)
                return SHARED.corrected(threshold, arrived.num, self.asked), arrived.num
            best = largest_entries(
                me, "best", arrived.values.to(self.sum_dtype), self.asked
            )
            self._put(entries_at(arrived, best))
            return least(best.values), best.num

        yield me.sized("encode", pack, self.asked)
        yield AllGather(whole, room)
        result: tuple[float, int] = yield me.sized(
            "decode", write, self.asked, lambda: (threshold, self.asked)
        )
        return result

    def _even_out(self, entries: Entries, spread: Spread) -> Steps[Entries]:
        """Sends the sums that other ranks are to have; returns those that this rank has
        then.

        Their places are relative to the whole gradient, unless nothing moves.
        """
        me = self.me
        regions = self.regions
        ranks = range(self.me.world)
        sent = [self._moved(spread, me.rank, rank) for rank in ranks]
        come = [self._moved(spread, rank, me.rank) for rank in ranks]
        sizes = [
            [part.layout.slot_bytes if part else 0 for part in both]
            for both in (sent, come)
        ]
        buf = me.scratch("evened", sum(sizes[0]), self.out_N, torch.uint8, varies=True)
        out = me.scratch("came", sum(sizes[1]), self.out_N, torch.uint8, varies=True)
        pieces = [spread.piece(me.rank, rank) for rank in ranks]

        def pack() -> None:
            for one, at, slot in zip(sent, pieces, split(buf, sizes[0]), strict=True):
                if one is not None:
                    part = Entries(entries.indices_K[at], entries.values[at])
                    one.form.encode(part, one.length, slot[: one.layout.size_bytes])

        def joined() -> Entries:
            if spread.is_even:
                return entries
            own_piece = pieces[me.rank]
            kept_K = entries.indices_K[own_piece] + regions.edges[me.rank]
            slots = [slot for slot in split(out, sizes[1]) if slot.numel()]
            # Regions ascend with ranks, so entries of the ranks before this one come
            # first.
            before = sum(entries is not None for entries in come[: me.rank])
            lists = [entries for entries in come if entries is not None]
            ends = ((slots[:before], lists[:before]), (slots[before:], lists[before:]))
            low, high = (self._joined(*both) if both[0] else None for both in ends)
            parts = [
                entries
                for entries in (low, Entries(kept_K, entries.values[own_piece]), high)
                if entries
            ]
            return Entries(
                torch.cat([part.indices_K for part in parts]),
                torch.cat([part.values for part in parts]),
            )

        yield me.sized("encode", pack, entries.num)
        yield AllToAll(out, buf, tuple(sizes[1]), tuple(sizes[0]))
        count = spread.count(me.rank)
        evened: Entries = yield me.sized(
            "decode", joined, count, lambda: no_entries(self.out_N, count)
        )
        return evened

    def _moved(self, spread: Spread, source: int, target: int) -> _List | None:
        """The sums that one rank sends to another to even them out; None if there are
        none.
        """
        count = spread.moved(source, target)
        if not count:
            return None
        return self._of_region(source, count)

    def _of_region(self, rank: int, count: int) -> _List:
        """So many sums of a rank's region."""
        form, layout = self.regions.form(rank, count, self.dtype)
        return _List(form, layout, self.regions.length(rank), self.regions.edges[rank])

    def _list(self, rank: int, spread: Spread) -> _List:
        """The sums that a rank sends to all others."""
        count = spread.count(rank)
        numel = self.out_N.numel()
        if spread.is_even:
            return self._of_region(rank, count)
        form = smallest(self.regions.among, count, numel, 1, self.dtype)
        return _List(form, form.layout(count, numel, 1, self.dtype), numel, 0)

    def _agree(self, announced: list[int], threshold: float) -> Steps[_Listed]:
        """Tells all ranks how many sums this one has, and how many of them reach
        ``threshold``.
        """
        me = self.me
        regions = self.regions
        own_T = me.announced("own announced", _ANNOUNCED).copy_(torch.tensor(announced))
        announced_WT = me.announced("announced", _ANNOUNCED * me.world)
        yield AllGather(announced_WT, own_T)
        shares = regions.shares(self.asked)
        of_each = [rank for rank in range(me.world) for _ in range(_ANNOUNCED)]
        flat = me.sizes(
            announced_WT,
            [regions.length(rank) for rank in of_each],
            unit="elements",
            ranks=of_each,
            usual=[shares[rank] for rank in of_each],
        )
        reach_W = flat[1::_ANNOUNCED]
        most = round(MOST * self.asked)
        count = sum(reach_W)
        if not threshold or count < FEWEST * self.asked:
            return _Listed(flat[::_ANNOUNCED], is_all=True, is_exact=True)
        if count <= most:
            return _Listed(reach_W, is_all=False, is_exact=False)
        # At least 1 of each region that has any: what is not finite goes before all
        # else.
        quotas = [-(-most * reach // count) for reach in reach_W]
        return _Listed(quotas, is_all=False, is_exact=True)

    def _slots(self, counts: list[int]) -> list[Tensor]:
        sizes = slots_of(self.regions, counts, self.sum_dtype)
        return split(
            self.me.scratch("pushed", sum(sizes), self.out_N, torch.uint8, varies=True),
            sizes,
        )

    def _pack(self, parts: list[Entries]) -> tuple[list[Tensor], list[int]]:
        counts = [part.num for part in parts]
        slots = self._slots(counts)
        for rank, (slot, part) in enumerate(zip(slots, parts, strict=True)):
            form, layout = self.regions.form(rank, part.num, self.sum_dtype)
            form.encode(part, self.regions.length(rank), slot[: layout.size_bytes])
        return slots, counts

    def _add(self, arrived: list[Packed]) -> Entries:
        """Adds up what all ranks sent, in rank order, rounded to what travels."""
        length = self.regions.length(self.me.rank)
        ranks = decoded(self.me, arrived, [length] * self.me.world, 1)
        total = merged_entries(
            self.me, ranks, length, self.sum_dtype, 1 / self.me.world
        )
        return total._replace(values=total.values.to(self.dtype))

    def _choose(self, sums: Entries, threshold: float) -> tuple[Entries, list[int]]:
        """The sums that reach ``threshold``, and what this rank tells of both."""
        if not threshold:
            return sums, [sums.num, sums.num]
        most = min(sums.num, round(MOST * self.asked))
        reaching = entries_reaching(
            self.me, "sums", sums.values.to(self.sum_dtype), threshold, most
        )
        return entries_at(sums, reaching), [sums.num, reaching.num]

    def _cut(self, listed: Entries, count: int) -> Entries:
        """The ``count`` largest of these sums."""
        if listed.num == count:
            return listed
        return entries_at(
            listed,
            largest_entries(self.me, "cut", listed.values.to(self.sum_dtype), count),
        )

    def _joined(self, slots: list[Tensor], lists: Sequence[_List]) -> Entries:
        """Entries of lists one behind the other, by index of the whole gradient."""
        messages = [
            Packed(part.form, Payload(part.layout, slot[: part.layout.size_bytes]))
            for slot, part in zip(slots, lists, strict=True)
        ]
        each = decoded(self.me, messages, [part.length for part in lists], 1)
        shifted = [
            part.indices_K + listed.first
            for part, listed in zip(each, lists, strict=True)
        ]
        return Entries(torch.cat(shifted), torch.cat([part.values for part in each]))

    def _put(self, mean: Entries) -> None:
        scatter_entries(mean, Part(self.out_N.numel()), self.out_N)


def no_entries(like: Tensor, count: int) -> Entries:
    """The entries of a simulation, which have a number and no content."""
    values_K = like.new_empty(count, dtype=working_dtype(like.dtype))
    return Entries(like.new_empty(count, dtype=torch.int32), values_K)
