"""Sizes and counts that ranks tell each other before payloads travel.

Where a compressor's sizes follow from the spec, they are known and nothing is sent. So
which verbs come in which order follows from the compressor alone. Rows of embeddings
are counted in every step. Wire: 8 bytes for each other rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...contract import Compressor, Member
from ...contract.verbs import AllGather, AllToAll, Steps

SIZE_BYTES = torch.int64.itemsize
"""Bytes of one size on the wire."""


def tell_all(
    me: Member,
    codec: Compressor,
    size_bytes: int,
    limits: Sequence[int],
    *,
    usual: Sequence[int] | None = None,
) -> Steps[list[int]]:
    """Tells every rank this one's size; returns all ranks' sizes, in rank order.

    ``limits`` are the largest that each may have; ``usual`` is as for ``Member.sizes``.
    """
    if codec.traits.exact_size:
        return list(limits)
    told_W = yield from _told(me, size_bytes)
    return me.sizes(told_W, limits, usual=usual)


def tell_count(
    me: Member, count: int, most: int, *, unit: str = "units"
) -> Steps[list[int]]:
    """Tells every rank how many units this one has, at most ``most``.

    Returns all ranks' counts.

    In a simulation all ranks have as many.
    """
    told_W = yield from _told(me, count)
    return me.sizes(told_W, [most] * me.world, unit=unit, usual=[count] * me.world)


def _told(me: Member, own: int) -> Steps[Tensor]:
    own_1 = me.told("own size", 1).fill_(own)
    told_W = me.told("told sizes", me.world)
    yield AllGather(told_W, own_1)
    return told_W


def tell_each(
    me: Member, codec: Compressor, sizes: Sequence[int], limits: Sequence[int]
) -> Steps[list[int]]:
    """Tells rank i ``sizes[i]``; returns what each rank told this one."""
    if codec.traits.exact_size:
        return list(limits)
    told_W = yield from told_each(me, sizes)
    return me.sizes(told_W, limits)


def told_each(me: Member, own: Sequence[int]) -> Steps[Tensor]:
    """Tells rank i the number ``own[i]``; returns what each rank told this one."""
    own_W = me.told("own sizes", me.world).copy_(torch.tensor(own, device="cpu"))
    told_W = me.told("told sizes", me.world)
    one_each = (1,) * me.world
    yield AllToAll(told_W, own_W, one_each, one_each)
    return told_W
