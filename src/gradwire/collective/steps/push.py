"""The push: every rank sends every other one entries of the part that the other one serves.

Wire: 8 (W-1) bytes that tell how many units follow, then the payloads, each rounded up to 8 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...contract import Member
from ...contract.payload import Format, Payload
from ...contract.verbs import AllToAll, Compute, Steps
from ...kernels.sparse.format import SparseFormat
from .entries import Packed, split
from .rounds import to_each


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
    """Sends rank i the slot ``sent[i]`` of ``counts[i]`` units, and returns what all ranks sent.

    The messages are in rank order, this rank's own among them. ``form_of`` says how so many units
    of this rank's part are written, of which there are at most ``limit``. ``beside`` is done while
    the network is busy. ``like`` is on the device of the payloads.
    """
    own_W = me.told("own counts", me.world).copy_(torch.tensor(counts))
    told_W = me.told("told counts", me.world)
    one_each = (1,) * me.world
    yield AllToAll(told_W, own_W, one_each, one_each)
    usual = [counts[me.rank]] * me.world
    told = me.sizes(told_W, [limit] * me.world, unit="units", usual=usual)
    forms = [form_of(count) for count in told]
    slots = [layout.slot_bytes for _, layout in forms]
    arrived = split(me.scratch("arrived", sum(slots), like, torch.uint8, varies=True), slots)
    arrived[me.rank] = sent[me.rank]
    yield from to_each(me, sent, arrived, beside=beside)
    return [
        Packed(form, Payload(layout, slot[: layout.size_bytes]))
        for (form, layout), slot in zip(forms, arrived, strict=True)
    ]
