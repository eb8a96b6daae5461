"""Every rank sends something else to every other rank, one or several at a time.

In a round rank r sends to ranks r + d and receives from ranks r - d, for some distances
d (``abreast``). An all-to-all starts all transfers at once: W - 1 of them meet at every
receiver, and a link drops the packets that overflow. One at a time, no two senders meet
at a receiver. On 8 shaped hosts at 100 Mbit with BBR, 172 kB to each and 172 kB back
took 231 ms one by one, 270 ms by two and 424 ms by three; the bytes alone take 201 ms.
At 200 Mbit these were 112, 125 and 131 ms. Small messages go all at once, as each round
costs a latency. Sizes are the callers' to know; nothing is padded, and ranks whose
sizes make them take other rounds still meet: the one that is least far never waits for
a rank that has not come to its distances.
"""

from collections.abc import Container, Sequence

from torch import Tensor

from ...contract import Member
from ...contract.verbs import Compute, Recv, Send, Steps, Verb

ROOM_BYTES = 512 * 1024
"""The most bytes on their way to one receiver.

8 hosts gained by 0.25 and 0.44 MB, lost by 2.5.
"""


def abreast(size_bytes: int, world: int) -> int:
    """How many messages of at most so many bytes a rank sends at a time.

    >>> abreast(36_000, 8), abreast(360_000, 8)
    (7, 1)
    """
    at_once = (world - 1) * size_bytes <= ROOM_BYTES
    return max(1, world - 1) if at_once else 1


def distances(together: int, world: int) -> list[range]:
    """The distances of each round, ``together`` of them at a time.

    >>> distances(1, 4), distances(3, 4)
    ([range(1, 2), range(2, 3), range(3, 4)], [range(1, 4)])
    """
    return [
        range(first, min(first + together, world))
        for first in range(1, world, together)
    ]


def transfers(
    me: Member,
    away: range,
    sent: Sequence[Tensor],
    into: Sequence[Tensor],
    *,
    takers: Container[int] | None = None,
    givers: Container[int] | None = None,
) -> list[Verb]:
    """One round: ``sent[i]`` to the ranks i so far away, and ``into[i]`` from the ranks
    on the other side.

    Only ``takers`` are sent something, and only ``givers`` send it; None: all.
    """
    verbs: list[Verb] = []
    for distance in away:
        to = (me.rank + distance) % me.world
        source = (me.rank - distance) % me.world
        if (takers is None or to in takers) and (givers is None or me.rank in givers):
            verbs.append(Send(to, sent[to]))
        if (takers is None or me.rank in takers) and (
            givers is None or source in givers
        ):
            verbs.append(Recv(source, into[source]))
    return verbs


def to_each(
    me: Member, sent: Sequence[Tensor], into: Sequence[Tensor], *, beside: Compute
) -> Steps[None]:
    """``sent[i]`` goes to rank i, and ``into[i]`` becomes what rank i sent here.

    Nothing goes to this rank itself. ``beside`` is done during the first round.
    """
    works: tuple[Verb, ...] = (beside,)
    together = abreast(max(tensor.nbytes for tensor in sent), me.world)
    for away in distances(together, me.world):
        yield (*transfers(me, away, sent, into), *works)
        works = ()
