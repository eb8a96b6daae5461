"""How a verb's buffer gets to its receivers: bytes and costs follow from it.

The bytes that are counted (``sent_bytes``), what a verb costs by formula
(``planning/data/cluster.py``) and so what the simulator asks for it, all come from
``travel`` and ``copies_sent``.

Source: what gloo does in torch 2.13, by its own source and by the counters of 2 to 8
    shaped hosts (200 Mbit, 1 and 4 MB). An all-reduce and an all-gather go round a
    ring. Sums and gathers of at most ``ROOM_BYTES``, and all of far hosts, go straight
    to each rank (``runtime/transport/direct.py``). Bytes are the same. So do all
    reduce-scatters: gloo's are all-reduces that keep a part, and send twice as much.
    In an all-to-all each pair of ranks exchanges its parts. A broadcast is a binomial
    tree: the p-th rank from the root on passes the buffer on to all that are p + 2^i
    from it with 2^i > p.
A tree's node sends to all its children at once, and they share its link. So the last
copy is there when all sends of the nodes above it are over, one node behind the other:
among 2 to 8 ranks after 1, 2, 3, 4, 5, 5 and 6 times the buffer. 4 MB took 1.0, 2.0,
2.9, 4.0, 4.8, 4.7 and 5.0 times as long as to one rank: shares are not quite equal, and
a child that has its copy early goes on early. An all-to-all's latency is that of the W
- 1 messages that each rank hands over, as an all-gather's: on 8 hosts 64 bytes to each
took 0.6 times as long.

Near hosts differ from far ones. Near, a message costs the work of handing it over, for
each of a verb's ``rounds``. Far, it also costs the distance, for each of its ``hops``:
parts that leave at once are under way at once.
"""

from functools import lru_cache
from typing import NamedTuple

from ...contract.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Among,
    Broadcast,
    Compute,
    Recv,
    ReduceScatter,
    Send,
    Verb,
)
from ...errors import UnknownName
from .rounds import ROOM_BYTES

NOTES = 1
"""The notes that a payload waits for in a hop whose receive is not posted ahead: gloo
sends it once the receiver has said that its receive waits.
"""
AHEAD_BYTES = 2**21
"""Bytes of one verb's parts, at most, whose receives are posted ahead.

Far away a larger verb gains little by it, and its rooms would hold much memory.
"""
SIZE_BYTES = 8
"""Bytes in which a part says its size, where its receive is posted ahead."""
SEGMENT_BYTES = 2**20
"""The most bytes of a segment of gloo's ring all-reduce."""
FAR_S = 4e-3
"""The one-way latency from which on gathers and sums of all sizes go straight.

On four hosts of 100 Mbit, 4 MB took 1.06 times as long as by the ring where hosts were
near.
"""
_LONG_BYTES = 2**26
"""Larger gathers are sent in pieces, which gloo's ring does not do."""
IN_FLIGHT = 2
"""The segments that each rank of gloo's rings has on the way: a round has two or more.
"""

NAMES: dict[type, str] = {
    AllReduce: "all_reduce",
    AllGather: "all_gather",
    AllToAll: "all_to_all",
    ReduceScatter: "reduce_scatter",
    Broadcast: "broadcast",
    Send: "send",
    Recv: "send",
}
"""Names of the verbs for the network in cluster files. A verb's size is the bytes of
its buffer: for an all-gather the rank's own, for an all-to-all and a reduce-scatter the
whole input.
"""


def members(rank: int, world: int, ranks_per_host: int, among: Among) -> range:
    """The ranks, ``rank`` with them, that its verbs are for.

    Ranks are numbered host after host.

    Shards are no ranks of this world: among them a rank is alone here.

    >>> members(3, 8, 2, Among.HOST), members(3, 8, 2, Among.HOSTS)
    (range(2, 4), range(1, 8, 2))
    """
    place = rank % ranks_per_host
    match among:
        case Among.RANKS:
            return range(world)
        case Among.SHARDS:
            return range(rank, rank + 1)
        case Among.HOST:
            return range(rank - place, rank - place + ranks_per_host)
        case Among.HOSTS:
            return range(place, world, ranks_per_host)


class Travel(NamedTuple):
    """The cost of a verb, in messages and in times of its whole size on a link."""

    rounds: int
    """The messages that a rank hands over one behind the other."""
    copies: float
    """How many times the whole size passes over links, one time after another."""


def is_straight(
    verb: str, whole_bytes: float, world: int, latency_s: float = 0.0
) -> bool:
    """Whether a verb's parts go straight to each rank, and not round a ring.

    ``whole_bytes`` are those of the largest buffer: of a gather's result. All ranks
    know them, and the one-way latency. Between near hosts large gathers and sums keep
    to the ring, whose links have one sender each.

    >>> is_straight("all_reduce", 4096, 4), is_straight("all_reduce", 2**20, 4)
    (True, False)
    >>> is_straight("all_reduce", 2**20, 4, latency_s=0.04)
    True
    """
    if verb in ("all_gather", "all_reduce"):
        rings = world > 2 and latency_s < FAR_S and whole_bytes > ROOM_BYTES
        # a wait of gloo's for half a part would outlast a time-out
        is_long = verb == "all_gather" and whole_bytes > _LONG_BYTES
        return not rings or is_long
    return verb in ("all_to_all", "reduce_scatter")


def ahead_bytes(verb: str, world: int, latency_s: float = 0.0) -> int:
    """The largest size of a verb whose receives are posted ahead; 0 for other verbs.

    All sums and gathers of near hosts that go straight to each rank are of that kind.
    """
    if not is_straight(verb, 0, world):
        return 0
    most = max(0, AHEAD_BYTES - SIZE_BYTES * world)
    if verb in ("all_gather", "all_reduce"):
        whole_bytes = most // 2 if world == 2 and verb == "all_reduce" else most
        if not is_straight(verb, whole_bytes, world, latency_s):
            whole_bytes = ROOM_BYTES
        return whole_bytes if verb == "all_reduce" else whole_bytes // world
    return most


def hops(verb: str, world: int) -> int:
    """The transfers of a short verb that begin when another has arrived.

    Each crosses the distance once for its payload. If its receive is not posted ahead,
    it also does for each of ``NOTES``. Sums and gathers that are not straight have a
    hop for each of their ``rounds``. Two ranks give each other all that they sum.

    >>> hops("all_reduce", 4), hops("all_reduce", 2), hops("broadcast", 4)
    (2, 1, 2)
    """
    if is_straight(verb, 0, world):
        return 2 if verb == "all_reduce" and world > 2 else 1
    return travel(verb, world).rounds


@lru_cache(maxsize=4096)
def travel(verb: str, world: int) -> Travel:
    """How a verb of ``NAMES`` travels among ``world`` ranks.

    Raises ``UnknownName`` for another.

    >>> travel("all_reduce", 4), travel("broadcast", 4)
    (Travel(rounds=6, copies=1.5), Travel(rounds=2, copies=3))
    """
    others = world - 1
    if verb == "send":
        return Travel(1, 1)
    if verb == "broadcast":
        return Travel(others.bit_length(), _tree_copies(0, world))
    rounds = 2 * others if verb == "all_reduce" else others
    parts, of = copies_sent(verb, world)
    return Travel(rounds, parts / of)


@lru_cache(maxsize=4096)
def copies_sent(verb: str, world: int, from_root: int = 0) -> tuple[int, int]:
    """How many times its size a rank sends, as a fraction (numerator, denominator).

    In a broadcast the rank is the ``from_root``-th from the root on; elsewhere all send
    alike.

    >>> copies_sent("all_reduce", 4)
    (6, 4)
    >>> [copies_sent("broadcast", 6, from_root)[0] for from_root in range(6)]
    [3, 2, 0, 0, 0, 0]
    """
    others = world - 1
    match verb:
        case "all_reduce":
            return 2 * others, world
        case "all_gather":
            return others, 1
        case "all_to_all" | "reduce_scatter":
            return others, world
        case "broadcast":
            return len(_children(from_root, world)), 1
        case "send":
            return 1, 1
        case _:
            raise UnknownName("verb", verb, tuple(dict.fromkeys(NAMES.values())))


def bytes_sent(verb: str, size_bytes: int, world: int, from_root: int = 0) -> int:
    """Bytes that a rank sends for a verb of this size.

    ``from_root`` as in ``copies_sent``.
    """
    parts, of = copies_sent(verb, world, from_root)
    return parts * size_bytes // of


def sent_bytes(verb: Verb, rank: int, world: int) -> int:
    """Bytes that ``rank`` puts on the wire for a verb, the network's own headers aside.

    Exact, but for the rounding of chunks that cannot be equal in an all-reduce.
    """
    match verb:
        case Compute() | Recv():
            return 0
        case AllToAll(_, buf, _, in_sizes):
            return (sum(in_sizes) - in_sizes[rank]) * buf.element_size()
        case AllGather(out, buf):  # among however many
            return (out.numel() - buf.numel()) * buf.element_size()
        case _:
            from_root = (rank - verb.src) % world if isinstance(verb, Broadcast) else 0
            return bytes_sent(NAMES[type(verb)], verb.buf.nbytes, world, from_root)


def _children(from_root: int, world: int) -> list[int]:
    """Whom the rank passes a broadcast on to; all are counted from the root."""
    steps = range(from_root.bit_length(), (world - 1).bit_length())
    return [from_root + (1 << i) for i in steps if from_root + (1 << i) < world]


def _tree_copies(from_root: int, world: int) -> int:
    """Copies one behind the other from a rank to the last rank below it."""
    below = _children(from_root, world)
    return len(below) + max((_tree_copies(child, world) for child in below), default=0)
