"""Sizes and counts that ranks announce before payloads travel.

Where a compressor's sizes follow from the spec, they are known and nothing is sent. So
which verbs come in which order follows from the compressor alone. Rows of embeddings
are counted in every step. Wire: 8 bytes for each other rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...contract import Compressor, Member
from ...contract.verbs import AllGather, AllToAll, Steps

SIZE_BYTES = torch.int64.itemsize
"""Bytes of one size on the wire."""


def announce_all(
    me: Member,
    codec: Compressor,
    size_bytes: int,
    limits: Sequence[int],
    *,
    usual: Sequence[int] | None = None,
) -> Steps[list[int]]:
    """Announces this rank's size; returns all ranks' sizes, in rank order.

    ``limits`` are the largest that each may have; ``usual`` is as for ``Member.sizes``.
    """
    if codec.traits.exact_size:
        return list(limits)
    announced_W = yield from _announced(me, size_bytes)
    return me.sizes(announced_W, limits, usual=usual)


def announce_count(
    me: Member, count: int, most: int, *, unit: str = "units"
) -> Steps[list[int]]:
    """Announces how many units this rank has, at most ``most``.

    Returns all ranks' counts.

    In a simulation all ranks have as many.
    """
    announced_W = yield from _announced(me, count)
    return me.sizes(announced_W, [most] * me.world, unit=unit, usual=[count] * me.world)


def _announced(me: Member, number: int) -> Steps[Tensor]:
    own_1 = me.announced("own size", 1).fill_(number)
    announced_W = me.announced("announced sizes", me.world)
    yield AllGather(announced_W, own_1)
    return announced_W


def announce_each(
    me: Member, codec: Compressor, sizes: Sequence[int], limits: Sequence[int]
) -> Steps[list[int]]:
    """Announces ``sizes[i]`` to rank i; returns what others announced here."""
    if codec.traits.exact_size:
        return list(limits)
    announced_W = yield from announced_each(me, sizes)
    return me.sizes(announced_W, limits)


def announced_each(me: Member, numbers: Sequence[int]) -> Steps[Tensor]:
    """Announces ``own[i]`` to rank i; returns what others announced here."""
    own_W = me.announced("own sizes", me.world).copy_(
        torch.tensor(numbers, device="cpu")
    )
    announced_W = me.announced("announced sizes", me.world)
    one_each = (1,) * me.world
    yield AllToAll(announced_W, own_W, one_each, one_each)
    return announced_W
