"""How sums travel in a pull: by name and size for predictions, and as verbs with their room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...contract import Member
from ...contract.travel import bytes_sent
from ...contract.verbs import AllGather, Verb
from .entries import split


class Pull(NamedTuple):
    """One verb in which sums travel: its name, its size in bytes and, of a broadcast, its root."""

    verb: str
    size_bytes: int
    root: int = 0


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
    own = me.scratch("pushed", size, like, torch.uint8, varies=True)
    whole = me.scratch("arrived", me.world * size, like, torch.uint8, varies=True)
    return Delivery(own, split(whole, [size] * me.world), (AllGather(whole, own),))


def pulled_bytes(pulls: Sequence[Pull], rank: int, world: int) -> int:
    """Bytes that a rank sends in these verbs.

    >>> [pulled_bytes([Pull("broadcast", 10, root=1)], rank, 4) for rank in range(4)]
    [0, 20, 10, 0]
    """
    return sum(bytes_sent(verb, size, world, (rank - root) % world) for verb, size, root in pulls)
