"""Row-sparse gradients, as ``nn.Embedding(sparse=True)`` makes them: averaged without loss.

They are never made dense: what comes in and goes out are row numbers and rows. Two kinds of ways,
each named by a collective: everyone gets everyone's rows and adds them up, or every row goes to the
rank that serves it, by its hash (ZEN) or its place, and the sums come back. All give the same bits.
A row that some rank has, be it all zeros, is in the mean.

Source: what DDP does with sparse gradients (all-gather of indices and values); ZEN (OSDI 2025),
    section 4, for embeddings.
Differences: row counts are told first, and the way follows from them. Gathered rows are padded to
    the largest count, so every rank may have touched another number of rows, or none.
Wire: 8 (W-1) bytes for counts; gathered, then (W-1) * max rows * (8 + row bytes) a rank; served,
    what the collective sends of units that are rows (its pulls never dense).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..contract import Member
from ..contract.collective import Collective
from ..sparse.entries import Entries
from ..spec import working_dtype
from ..verbs import AllGather, Compute, Steps
from .cut import Cut, cached_parts
from .push_pull import PushPull

Rows = tuple[Tensor, Tensor]
"""Row numbers int64, ascending and without duplicates, and their values_RC."""


def average_rows(
    me: Member, rows: Rows, num_rows: int, choose: Callable[[list[int]], Collective]
) -> Steps[Rows]:
    """The mean over ranks of rows of a table of ``num_rows``.

    Ranks may differ in how many rows they have, not in their length. ``choose`` is given all ranks'
    counts and names the way, one that carries rows; it decides alike on all of them.
    """
    rows_R, values_RC = rows
    counts_W = torch.zeros(me.world, dtype=torch.int64)
    yield AllGather(counts_W, torch.tensor([rows_R.numel()]))
    counts = me.sizes(counts_W, [num_rows] * me.world, unit="rows")
    me.way = me.imbalance = None
    if max(counts) == 0:
        return rows
    way = choose(counts)
    assert way.carries_rows, way
    me.way = type(way).__name__
    if isinstance(way, PushPull):
        return (yield from _served(me, way, rows_R, values_RC, num_rows))
    return (yield from _gathered(me, counts, rows_R, values_RC))


def _gathered(me: Member, counts: list[int], rows_R: Tensor, values_RC: Tensor) -> Steps[Rows]:
    width, most = values_RC.shape[1], max(counts)
    own_rows = torch.zeros(most, dtype=torch.int64)
    own_values = torch.zeros(most * width, dtype=values_RC.dtype)
    own_rows[: rows_R.numel()] = rows_R
    own_values[: values_RC.numel()] = values_RC.reshape(-1)
    all_rows = torch.empty(me.world * most, dtype=torch.int64)
    all_values = torch.empty(me.world * most * width, dtype=values_RC.dtype)
    yield AllGather(all_rows, own_rows)
    yield AllGather(all_values, own_values)

    def merge() -> Rows:
        parts = [slice(r * most, r * most + n) for r, n in enumerate(counts)]
        rows = torch.cat([all_rows[part] for part in parts])
        values = torch.cat([all_values.view(-1, width)[part] for part in parts])
        union, place = torch.unique(rows, return_inverse=True)
        # As servers do: scaled, then added in rank order, then rounded; so the bits are theirs.
        dtype = working_dtype(values.dtype)
        mean = torch.zeros(union.numel(), width, dtype=dtype)
        mean.index_add_(0, place, values.to(dtype).mul_(1 / me.world))
        return union, mean.to(values.dtype)

    merged: Rows = yield Compute("merge", merge, me.world * most * width)
    return merged


def _served(
    me: Member, servers: PushPull, rows_R: Tensor, values_RC: Tensor, num_rows: int
) -> Steps[Rows]:
    """The steps of ``PushPull.run`` with rows where that has payloads of a dense gradient."""
    width, dtype = values_RC.shape[1], values_RC.dtype
    parts = cached_parts(num_rows, me.world, servers.permutation(num_rows))
    cut = Cut(num_rows * width, width, parts, dtype, dtype, is_listed=True)
    units = Entries(rows_R.to(torch.int32), values_RC.reshape(-1), width)
    like = values_RC.new_empty(0)  # stands for a dense mean, of which there is none
    sent, counts = yield Compute(
        "partition", lambda: servers.spread(me, cut, units), rows_R.numel()
    )
    nothing = Compute("clear", lambda: None)
    arrived = yield from servers.push(me, cut, sent, counts, nothing, like)
    usual = [0] * me.world, [0] * me.world  # for simulations, which have no rows
    total, told = yield from servers.merge(me, cut, arrived, counts, usual, like)
    found = [units] * me.world

    def put(rank: int, entries: Entries) -> None:
        places_K, values, _ = entries
        found[rank] = Entries(parts[rank].indices(places_K), values, width)

    yield from servers.pull(me, cut, total, told, like, put)

    def merge() -> Rows:
        rows = torch.cat([part.indices_K for part in found])
        values = torch.cat([part.values.view(-1, width) for part in found])
        order = rows.argsort()
        return rows[order].long(), values[order]

    merged: Rows = yield Compute("merge", merge, sum(part.values.numel() for part in found))
    return merged
