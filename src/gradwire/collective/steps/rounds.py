"""Every rank sends something else to every other rank, a few of them at a time.

In a round rank r sends to ranks r + d and receives from ranks r - d, for some distances d
(``abreast``). An all-to-all starts all transfers at once: W - 1 of them meet at every receiver,
what overflows there is lost, and where all of a window was lost TCP waits 200 ms. One at a time,
each round waits for its slowest pair. On 8 shaped hosts at 200 Mbit, 360 kB to each took 306 ms as
an all-to-all, 190 ms one by one, 155 ms by three, and 101 ms are their bytes; 36 kB: 17, 38, 20 and
10 ms. By two they took 0.85 to 0.95 of the time by three on busy cores (143 against 162 ms at best,
and 64 against 77 ms of 176 kB). So small messages go all at once. Sizes are the callers' to know;
nothing is padded, and ranks whose sizes make them take other rounds still meet: the one that is
least far never waits for a rank that has not come to its distances.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch import Tensor

from ...contract import Member
from ...contract.verbs import Compute, Recv, Send, Steps, Verb

FEW = 2
"""The most large messages that a rank sends at a time."""
ROOM_BYTES = 512 * 1024
"""The most bytes on their way to one receiver. 8 hosts gained by 0.25 and 0.44 MB, lost by 2.5."""


def abreast(size_bytes: int, world: int, room_bytes: int = ROOM_BYTES) -> int:
    """How many messages of at most so many bytes a rank sends at a time.

    >>> abreast(36_000, 8), abreast(360_000, 8)
    (7, 2)
    """
    at_once = (world - 1) * size_bytes <= room_bytes
    return max(1, world - 1) if at_once else few(world)


def few(world: int) -> int:
    """How many large messages a rank sends at a time: at most ``FEW``, in two rounds or more."""
    return max(1, min(FEW, world - 2))


def distances(together: int, world: int) -> list[range]:
    """The distances of each round, ``together`` of them at a time.

    Where there are several rounds the last is of one alone: beside it all is done that the others
    brought, and what it brings itself is the least that is left to do.

    >>> distances(2, 8), distances(7, 8)
    ([range(1, 3), range(3, 5), range(5, 7), range(7, 8)], [range(1, 8)])
    """
    last = world - 1
    if together >= last:
        return [range(1, world)] if last else []
    firsts = range(1, last, together)
    return [*(range(first, min(first + together, last)) for first in firsts), range(last, world)]


def transfers(
    me: Member,
    away: range,
    sent: Sequence[Tensor],
    into: Sequence[Tensor],
    *,
    takers: Container[int] | None = None,
    givers: Container[int] | None = None,
) -> list[Verb]:
    """One round: ``sent[i]`` to the ranks i so far away, and ``into[i]`` from those on the other
    side.

    Only ``takers`` are sent something, and only ``givers`` send it; None: all.
    """
    verbs: list[Verb] = []
    for distance in away:
        to, source = (me.rank + distance) % me.world, (me.rank - distance) % me.world
        if (takers is None or to in takers) and (givers is None or me.rank in givers):
            verbs.append(Send(to, sent[to]))
        if (takers is None or me.rank in takers) and (givers is None or source in givers):
            verbs.append(Recv(source, into[source]))
    return verbs


def to_each(
    me: Member, sent: Sequence[Tensor], into: Sequence[Tensor], *, beside: Compute
) -> Steps[None]:
    """``sent[i]`` goes to rank i, and ``into[i]`` becomes what rank i sent here.

    Nothing goes to this rank itself. ``beside`` is done during the first round.
    """
    works: tuple[Verb, ...] = (beside,)
    together = abreast(max(one.numel() * one.element_size() for one in sent), me.world)
    for away in distances(together, me.world):
        yield (*transfers(me, away, sent, into), *works)
        works = ()
