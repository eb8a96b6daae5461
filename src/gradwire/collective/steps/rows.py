"""Row-sparse gradients (``nn.Embedding(sparse=True)``), averaged without loss.

They are never made dense: what comes in and goes out are row numbers and rows. Two
kinds of ways,
each named by a collective: everyone gets everyone's rows and adds them up, or every row
goes to the rank that serves it, by its hash (ZEN) or its place, and the sums come back.
All give the same bits. A row that some rank has, be it all zeros, is in the mean.

Source: what DDP does with sparse gradients (all-gather of indices and values); ZEN
    (OSDI 2025), section 4, for embeddings.
Differences: row counts are announced first, and the way follows from them. Gathered
    rows are padded to the largest count, so every rank may have touched another number
    of rows, or none.
Wire: 8 (W-1) bytes for counts; gathered, then (W-1) * COO(max rows) a rank, 4 bytes and
    its values for each row; served, what the collective sends of units that are rows
    (its pulls never dense).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...contract import Member
from ...contract.collective import Collective
from ...contract.payload import Payload
from ...contract.spec import working_dtype
from ...contract.verbs import Compute, Steps
from ...kernels.sparse.entries import Entries
from ...kernels.sparse.formats.coo import coo
from .ordered_sums import merged_entries
from .push_pull import Cut, PushPull, cached_parts, gathered, push
from .sizes import announce_count

TableRows = tuple[Tensor, Tensor]
"""Row numbers int64, ascending and without duplicates, and their values_RC."""


def average_rows(
    me: Member,
    rows: TableRows,
    num_rows: int,
    choose: Callable[[list[int]], Collective],
) -> Steps[TableRows]:
    """The mean over ranks of rows of a table of ``num_rows``.

    Ranks may differ in how many rows they have, not in their length. ``choose`` is
    given all ranks' counts and names the way, one that carries rows; it decides alike
    on all of them.
    """
    rows_R, values_RC = rows
    counts = yield from announce_count(me, rows_R.numel(), num_rows, unit="rows")
    me.way = me.imbalance = None
    if max(counts) == 0:
        return rows
    way = choose(counts)
    assert way.carries_rows, way
    me.way = type(way).__name__
    units = Entries(rows_R.to(torch.int32), values_RC.reshape(-1), values_RC.shape[1])
    if isinstance(way, PushPull):
        return (yield from _served(me, way, units, num_rows))
    return (yield from _gathered(me, counts, units, num_rows))


def _gathered(
    me: Member, counts: list[int], units: Entries, num_rows: int
) -> Steps[TableRows]:
    width = units.width
    dtype = units.values.dtype
    layouts = [coo().layout(count, num_rows, width, dtype) for count in counts]
    slots = [layout.slot_bytes for layout in layouts]
    own_room, received, (gather,) = gathered(me, slots, units.values)

    def pack() -> None:
        coo().encode(units, num_rows, own_room[: layouts[me.rank].size_bytes])

    yield Compute("pack", pack, units.values.numel())
    yield gather

    def merge() -> TableRows:
        ranks = [
            coo().decode(Payload(layout, slot[: layout.size_bytes]), num_rows, width)
            for layout, slot in zip(layouts, received, strict=True)
        ]
        sums = merged_entries(me, ranks, num_rows, working_dtype(dtype), 1 / me.world)
        values_RC = sums.values.to(dtype, copy=True).view(-1, width)
        return sums.indices_K.long(), values_RC

    mean: TableRows = yield Compute("merge", merge, sum(counts) * width)
    return mean


def _served(
    me: Member, servers: PushPull, units: Entries, num_rows: int
) -> Steps[TableRows]:
    """``PushPull.run``'s steps, with rows in place of a dense gradient's payloads."""
    width = units.width
    dtype = units.values.dtype
    parts = cached_parts(num_rows, me.world, servers.permutation(num_rows))
    cut = Cut(num_rows * width, width, parts, dtype, dtype, is_listed=True)
    like = units.values.new_empty(0)  # in place of a dense mean
    sent, counts = yield Compute(
        "partition", lambda: servers.spread(me, cut, units), units.values.numel()
    )
    nothing = Compute("clear", lambda: None)
    form_of = partial(servers.pushed, cut, me.rank)
    most = parts[me.rank].length
    arrived = yield from push(
        me, sent, counts, form_of, most, beside=nothing, like=like
    )
    usual = [0] * me.world, [0] * me.world  # for simulations, which have no rows
    total, announced = yield from servers.merge(me, cut, arrived, counts, usual)
    rows_of_ranks = [units] * me.world

    def put(rank: int, entries: Entries) -> None:
        places_K, values, _ = entries
        rows_of_ranks[rank] = Entries(parts[rank].indices(places_K), values, width)

    yield from servers.pull(me, cut, total, announced, like, put)

    def merge() -> TableRows:
        rows = torch.cat([part.indices_K for part in rows_of_ranks])
        values = torch.cat([part.values.view(-1, width) for part in rows_of_ranks])
        order = rows.argsort()
        return rows[order].long(), values[order]

    merged: TableRows = yield Compute(
        "merge", merge, sum(part.values.numel() for part in rows_of_ranks)
    )
    return merged
