"""Every rank sends something else to every other rank, a few of them at a time.

In a round rank r sends to ranks r + d and receives from ranks r - d, for some distances d
(``abreast``). An all-to-all starts all transfers at once: W - 1 of them meet at every receiver,
what overflows there is lost, and where all of a window was lost TCP waits 200 ms. One at a time,
each round waits for its slowest pair. On 8 shaped hosts at 200 Mbit, 360 kB to each took 306 ms as
an all-to-all, 190 ms one by one, 155 ms by three, and 101 ms are their bytes; 36 kB: 17, 38, 20 and
10 ms. So small messages go all at once. Sizes are the callers' to know; nothing is padded, and
ranks whose sizes make them take other rounds still meet: the one that is least far never waits
for a rank that has not come to its distances.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..contract import Member
from ..verbs import Compute, Recv, Send, Steps, Verb

_FEW = 3
_ROOM_BYTES = 512 * 1024
"""The most bytes on their way to one receiver. 8 hosts gained by 0.25 and 0.44 MB, lost by 2.5."""


def abreast(size_bytes: int, world: int) -> int:
    """How many messages of at most so many bytes a rank sends at a time.

    >>> abreast(36_000, 8), abreast(360_000, 8)
    (7, 3)
    """
    return max(1, world - 1) if (world - 1) * size_bytes <= _ROOM_BYTES else _FEW


def to_each(
    me: Member, sent: Sequence[Tensor], into: Sequence[Tensor], *, beside: Compute
) -> Steps[None]:
    """``sent[i]`` goes to rank i, and ``into[i]`` becomes what rank i sent here.

    Nothing goes to this rank itself. ``beside`` is done during the first round.
    """
    rank, world = me.rank, me.world
    works: tuple[Verb, ...] = (beside,)
    together = abreast(max(one.numel() * one.element_size() for one in sent), world)
    for first in range(1, world, together):
        verbs: list[Verb] = []
        for distance in range(first, min(first + together, world)):
            to, source = (rank + distance) % world, (rank - distance) % world
            verbs += [Send(to, sent[to]), Recv(source, into[source])]
        yield (*verbs, *works)
        works = ()
