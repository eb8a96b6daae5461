"""Direct transfers: parts go straight to each rank, in place of a ring.

gloo's all-gather passes payloads round a ring of W - 1 hops, and its all-reduce takes
2 (W - 1). Here each rank sends its part to every other at once: the bytes on its link
are the same, and it takes one hop. A sum takes two: each rank adds up a chunk for all,
and all gather the chunks. Far away a hop is a latency.

A rank spends about 0.1 ms of a core on each part that it sends and receives. So among
many near ranks a small gather takes two hops: along rows of ranks, then along columns.
Each rank then handles as many parts as a row and a column have. ``agree_on_ways``
measures whether that is faster, so all ranks choose alike.

A sum has the bits of gloo's ring, so a choice between both changes no mean. The ring
begins the sum of rank c's chunk at rank c - 1, and passes it down to rank c.

gloo sends a payload only once it has heard that the receive is posted, which costs a
latency more. So receives of small parts are posted ahead. Nobody knows yet where the
next part is wanted, so these receives fill memory of the channel's own, called rooms. A
room has one of a few sizes, and parts of several sizes fit in. So the size of a part is
sent before its bytes.

A large part is cut into pieces. gloo's time-out bounds the wait for each piece, so it
bounds silence and not the time of a payload. While later pieces are on their way, a sum
adds up the pieces that have come.

Ranks may post receives at different times, and the same payload still fills the same
receive. gloo matches sends and receives of one tag in the order in which they began. A
piece's tag is its size, or the size of its room. Both ends derive it from the size of
the part, and begin their pieces in the order of verbs. So between two ranks the k-th
piece of a tag fills the k-th receive of this tag. In an all-reduce, receives of the
gathered sums begin early, before receives of verbs that are started together with it.
So gathered sums have tags of their own.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from ...collective.steps.travel import (
    AHEAD_BYTES,
    IN_FLIGHT,
    NAMES,
    SEGMENT_BYTES,
    SIZE_BYTES,
    is_straight,
)
from ...contract.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Communication,
    ReduceScatter,
)
from ...errors import ExitCode, RankFailed

Straight = AllGather | AllReduce | AllToAll | ReduceScatter
"""The verbs whose parts may go straight to each rank."""
DIRECT_TAGS = 2**30
"""The least tag of direct parts; smaller tags are those of sends."""
_ROOM_TAGS = DIRECT_TAGS | 2**29
"""The least tag of parts with a room; the size of the room is added to it."""
_SUM_TAGS = DIRECT_TAGS | 2**28
"""The least tag of gathered sums, and of the second hop of a gather in rows."""
PIECE_BYTES = 2**20
"""The most bytes of a piece, as of a segment of gloo's rings."""
TREE_BYTES = 2**24
"""The most bytes of a piece of a broadcast, in which gloo passes pieces down a tree."""
_LEAST_RATE = 1.25e6
"""Bytes per second of the slowest link on which a piece fits into the time-out."""
_UNDER_WAY_BYTES = 2**25
"""The most bytes of one sum whose receives wait at once, on all ranks together.

A link of 1 Gbit/s with a round trip of 80 ms has 10 MB on the way.
"""
_LEAST_BYTES = 256
"""The size of the smallest rooms."""
_LEAST_SAVED = 2
"""A gather takes two hops only if each rank then sends at least so many parts less."""


class Waits(Protocol):
    """Work under way."""

    def wait(self) -> Any:
        """Waits until it has ended."""


def goes_straight(verb: Communication, channel: HostChannel) -> TypeGuard[Straight]:
    """Whether a verb's parts go straight to each rank, on all ranks alike.

    The rule is ``is_straight``, which planners read too.
    """
    match verb:
        case (
            AllGather(whole) | AllReduce(whole) | AllToAll(whole) | ReduceScatter(whole)
        ):
            return is_straight(
                NAMES[type(verb)], whole.nbytes, channel.size(), channel.latency_s
            )
        case _:
            return False


def room_bytes(part_bytes: int, world: int) -> int:
    """The size of the room for a part, a power of two; 0 for a large part without one.

    gloo would end a process that receives more bytes than it has room for.

    >>> room_bytes(3, 4), room_bytes(300, 4), room_bytes(1_000_000, 4)
    (256, 512, 0)
    """
    needed_bytes = SIZE_BYTES + part_bytes
    if needed_bytes * world > AHEAD_BYTES:
        return 0
    return max(_LEAST_BYTES, 1 << (needed_bytes - 1).bit_length())


def piece_numels(numel: int, world: int, item_bytes: int = 1) -> list[int]:
    """The number of elements of each piece of a part; the first piece fits in a room.

    >>> piece_numels(3_000_000, 4)
    [524280, 1048576, 1048576, 378568]
    """
    if not numel:
        return []
    first = (AHEAD_BYTES // world - SIZE_BYTES) // item_bytes
    begins = [0, *range(first, numel, PIECE_BYTES // item_bytes)]
    ends = [*begins[1:], numel]
    return [end - begin for begin, end in zip(begins, ends, strict=True)]


@lru_cache
def _size(part_bytes: int) -> Tensor:
    """The bytes that say the size of a part."""
    size = torch.tensor([part_bytes], dtype=torch.int64, device="cpu")
    return size.view(torch.uint8)


class Receive(NamedTuple):
    """A receive under way: the memory that it fills, and its work."""

    src: int
    memory: Tensor
    work: Waits


class Sent(NamedTuple):
    """A send under way: its work, and the room that holds the part, if any."""

    work: Waits
    room: Tensor | None


class OtherSize(RankFailed):
    """A part that arrived does not have the size that this rank wants.

    ``src`` is its sender's place in the verb's group.
    """

    def __init__(self, src: int, message: str) -> None:
        super().__init__(message, exit_code=ExitCode.BROKEN)
        self.src = src


class HostChannel(ProcessGroupGloo):
    """gloo among hosts, with receives that are posted before parts are wanted.

    A verb posts receives for the next verb when it begins, so the senders have heard of
    them in time. For each tag as many receives wait as verbs use at once. A receive
    that nothing fills waits until the channel closes. Its errors show only if a verb
    uses it, as ranks may close their channels one after another.

    Args:
        store: The store in which the ranks meet.
        rank: This rank's place among them.
        world: The number of ranks.
        timeout: How long a rank waits for another.
    """

    # torch's stub lacks them
    send: Callable[..., Waits]
    recv: Callable[..., Waits]

    def __init__(self, store: Store, rank: int, world: int, timeout: timedelta) -> None:
        super().__init__(store, rank, world, timeout)
        self._ahead: dict[tuple[int, int], deque[Receive]] = defaultdict(deque)
        """The receives that wait, by the rank that sends and the size of their room."""
        self._num_used: Counter[tuple[int, int]] = Counter()
        """The number of receives that verbs use now, by the same key."""
        self._free: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        """The rooms whose receives have ended, by the same key."""
        self._spare: dict[int, list[Tensor]] = defaultdict(list)
        """Memory for what is sent, and for large pieces of sums, by its size."""
        self.tree_bytes = TREE_BYTES
        """The most bytes of a piece of a broadcast; it fits into the time-out."""
        if world > 1:
            most = _LEAST_RATE * timeout.total_seconds() / (4 * (world - 1))
            self.tree_bytes = max(_LEAST_BYTES, min(TREE_BYTES, int(most)))
        self.latency_s = 0.0
        """The latency to the farthest rank, one way; the same figure on all ranks."""
        self.row_width = world
        """The ranks in a row of small gathers; all ranks if one hop is faster."""
        self.ahead_bytes = 0
        """Bytes of all rooms of receives, which serve again and again."""

    def begin_sends(self, parts: Sequence[tuple[int, Tensor]]) -> list[Sent]:
        """Sends parts; each pair has the rank that gets the part, and the part."""
        rooms = {}
        sends = []
        for dst, part in parts:
            size_bytes = room_bytes(part.nbytes, self.size())
            if not size_bytes:
                sends.append(Sent(self.send([part], dst, _large_tag(part)), None))
                continue
            if id(part) not in rooms:
                rooms[id(part)] = self._filled(part, size_bytes)
            room = rooms[id(part)]
            sent = room[: SIZE_BYTES + part.nbytes]
            sends.append(Sent(self.send([sent], dst, _ROOM_TAGS | size_bytes), room))
        return sends

    def _filled(self, part: Tensor, size_bytes: int) -> Tensor:
        """A room with the size of a part before its bytes."""
        room = self.take(size_bytes)
        room[:SIZE_BYTES] = _size(part.nbytes)
        room[SIZE_BYTES : SIZE_BYTES + part.nbytes] = part.view(torch.uint8)
        return room

    def end_sends(self, sends: Sequence[Sent]) -> None:
        """Waits until parts are sent, and frees their rooms."""
        rooms = {}
        for work, room in sends:
            work.wait()
            if room is not None:
                rooms[id(room)] = room
        for room in rooms.values():
            self.give(room)

    def take(self, size_bytes: int) -> Tensor:
        """Takes memory of the channel's own, to be given back by ``give``."""
        spare = self._spare[size_bytes]
        return spare.pop() if spare else _memory(size_bytes)

    def give(self, memory: Tensor) -> None:
        """Gives memory back that was taken."""
        self._spare[memory.nbytes].append(memory)

    def begin_receive(self, src: int, part: Tensor, *, is_awaited: bool) -> Receive:
        """The receive of the next part from ``src``, which has the size of ``part``.

        A large part fills ``part`` itself, and any other part fills a room.
        ``is_awaited`` says whether ``src`` waits for a part that this rank sends after
        this call. Only then receives are posted ahead, as ``src`` hears of them before
        it can close. If it had closed, TCP would answer by a reset, and drop the parts
        that are still on their way from there.
        """
        size_bytes = room_bytes(part.nbytes, self.size())
        if not size_bytes:
            return Receive(src, part, self.recv([part], src, _large_tag(part)))
        key = (src, size_bytes)
        ahead = self._ahead[key]
        receive = ahead.popleft() if ahead else self._post(src, self._room(key))
        self._num_used[key] += 1
        if is_awaited:
            self._post_ahead(key)
        return receive

    def _post_ahead(self, key: tuple[int, int]) -> None:
        src, _ = key
        ahead = self._ahead[key]
        # A rank may have left. That is an error only once its part is wanted.
        with suppress(RuntimeError):
            while self._free[key] or len(ahead) < self._num_used[key]:
                ahead.append(self._post(src, self._room(key)))

    def arrived(self, receive: Receive, part: Tensor) -> Tensor:
        """Waits for the bytes of ``part``; returns them, maybe as part of a room.

        Raises ``OtherSize`` if the other rank has sent a part of another size.
        """
        src, memory, work = receive
        work.wait()
        if memory is part:
            return part
        size = memory[:SIZE_BYTES]
        if not size.equal(_size(part.nbytes)):
            raise OtherSize(
                src,
                f"rank {src} sent {size.view(torch.int64).item()} bytes where rank "
                f"{self.rank()} wants {part.nbytes}, as the ranks of a verb are "
                "counted: the exchange asks for other sizes there, or a bit changed",
            )
        return memory[SIZE_BYTES : SIZE_BYTES + part.nbytes]

    def free(self, receive: Receive, part: Tensor) -> None:
        """Frees the room of a part that has arrived."""
        if receive.memory is not part:
            key = (receive.src, receive.memory.nbytes)
            self._num_used[key] -= 1
            self._free[key].append(receive.memory)

    def _room(self, key: tuple[int, int]) -> Tensor:
        """A free room, or a new one."""
        if self._free[key]:
            return self._free[key].pop()
        _, size_bytes = key
        self.ahead_bytes += size_bytes
        return _memory(size_bytes)

    def _post(self, src: int, memory: Tensor) -> Receive:
        return Receive(
            src, memory, self.recv([memory], src, _ROOM_TAGS | memory.nbytes)
        )


def _memory(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")


def _large_tag(part: Tensor) -> int:
    """The tag of a part without a room: it only meets a receive of the same size."""
    return DIRECT_TAGS | part.nbytes


def agree_on_ways(channel: HostChannel) -> None:
    """Measures the latency to the farthest rank, and which small gathers are faster.

    All ranks call it. Then they choose the same ways, as they have the same figures.
    """
    world = channel.size()
    width = row_width(world)
    straight_s = _slowest_s(channel)
    channel.latency_s = straight_s
    if width == world:
        return
    channel.row_width = width
    rows_s = _slowest_s(channel)
    # each of the two hops crosses the distance
    channel.latency_s = min(straight_s, rows_s / 2)
    if straight_s <= rows_s:
        channel.row_width = world


def row_width(world: int) -> int:
    """The ranks in a row, if rows may be faster; else all ranks.

    All rows have the same length, and so have all columns.

    >>> row_width(4), row_width(8), row_width(12), row_width(13)
    (4, 4, 4, 13)
    """
    rows = math.isqrt(world)
    while world % rows:
        rows -= 1
    width = world // rows
    num_saved = world - 1 - (width - 1) - (rows - 1)
    return width if num_saved >= _LEAST_SAVED else world


def _slowest_s(channel: HostChannel) -> float:
    """The seconds of a short gather on the slowest rank, the same on all ranks.

    The first gather waits for the last rank, and is not measured.
    """
    own = torch.full((1,), math.inf, dtype=torch.float64, device="cpu")
    all_ranks = own.repeat(channel.size())
    for is_measured in (False, True, True, False):
        begin_s = time.perf_counter()
        begin_straight(AllGather(all_ranks, own), channel).wait()
        if is_measured:
            own.clamp_(max=time.perf_counter() - begin_s)
    return float(all_ranks.max())


def begin_straight(verb: Straight, channel: HostChannel) -> Waits:
    """Sends a verb's parts to all others; returns what waits for theirs.

    Args:
        verb: A verb on host memory.
        channel: The process group of gloo that carries it.
    """
    world = channel.size()
    match verb:
        case AllGather(out, buf) if _goes_in_rows(buf, channel):
            return GatherInRows(out.view(world, -1), buf.view(-1), channel)
        case AllGather(out, buf):
            own = [buf.view(-1)] * world
            return _exchange(own, out.view(world, -1).unbind(), channel)
        case AllToAll(out, buf, out_sizes, in_sizes):
            parts = torch.split(buf, [*in_sizes])
            return _exchange(parts, torch.split(out, [*out_sizes]), channel)
        case ReduceScatter(out, buf):
            return Sum(buf.view(world, -1).unbind(), out.view(-1), (), channel)
        case AllReduce(buf) if world == 2:
            return Sum([buf.view(-1)] * 2, buf.view(-1), (), channel)
        case AllReduce(buf):
            numels = ring_numels(buf.numel(), world, buf.itemsize)
            chunks = torch.split(buf.view(-1), numels)
            return Sum(chunks, chunks[channel.rank()], chunks, channel)


def _goes_in_rows(part: Tensor, channel: HostChannel) -> bool:
    """Whether a gather of parts of this size takes two hops, on all ranks alike."""
    world = channel.size()
    is_small = part.nbytes > 0 and room_bytes(part.nbytes, world) > 0
    return channel.row_width < world and is_small


def ring_numels(numel: int, world: int, item_bytes: int) -> list[int]:
    """The number of elements of each rank's chunk in gloo's ring all-reduce.

    gloo cuts a buffer into segments, and gives each rank the same number of them.

    >>> ring_numels(35, 4, 4), ring_numels(3, 4, 4)
    ([10, 10, 10, 5], [2, 1, 0, 0])
    """
    size_bytes = numel * item_bytes
    num_segments = max(-(-size_bytes // SEGMENT_BYTES), IN_FLIGHT * world)
    per_rank = -(-num_segments // world)
    segment_numel = -(-size_bytes // (per_rank * world * item_bytes))
    chunk = per_rank * segment_numel
    return [max(0, min(chunk, numel - rank * chunk)) for rank in range(world)]


def _exchange(
    own: Sequence[Tensor], arriving: Sequence[Tensor], channel: HostChannel
) -> Transfer:
    """A transfer of whole parts; the part for this rank itself is copied."""
    # equal parts are cut once
    pieces_of = {id(part): _pieces(part, len(own)) for part in own}
    sent = [pieces_of[id(part)] for part in own]
    wanted = [_pieces(part, len(own)) for part in arriving]
    transfer = Transfer(sent, wanted, channel)
    rank = channel.rank()
    arriving[rank].copy_(own[rank].view_as(arriving[rank]))
    return transfer


def _pieces(part: Tensor, world: int) -> Sequence[Tensor]:
    """The bytes of a part, in pieces; none of an empty one."""
    return torch.split(part.view(torch.uint8), piece_numels(part.nbytes, world))


class Transfer:
    """Pieces under way: ``own[i]`` go to rank i, and ``arriving[i]`` come from rank i.

    Receives begin first, as gloo sends only payloads that a receive waits for. If
    ``is_awaited``, all ranks later wait for a part of this rank. Else only the ranks
    that get a part in this transfer do.
    """

    def __init__(
        self,
        own: Sequence[Sequence[Tensor]],
        arriving: Sequence[Sequence[Tensor]],
        channel: HostChannel,
        *,
        is_awaited: bool = False,
    ) -> None:
        rank = channel.rank()
        world = len(own)
        others = [(rank + away) % world for away in range(1, world)]
        self._channel = channel
        self._receives: list[tuple[Receive, Tensor]] = []
        for src in others:
            awaited = is_awaited or bool(own[src])
            for piece in arriving[src]:
                receive = channel.begin_receive(src, piece, is_awaited=awaited)
                self._receives.append((receive, piece))
        self._sends = channel.begin_sends(
            [(dst, piece) for dst in reversed(others) for piece in own[dst]]
        )

    def arrived(self) -> dict[int, Tensor]:
        """Waits until all pieces are sent and received; returns those that came.

        They are by sender, one of each. They may lie in rooms, which ``free`` gives
        back.
        """
        pieces = {
            receive.src: self._channel.arrived(receive, piece)
            for receive, piece in self._receives
        }
        self._channel.end_sends(self._sends)
        return pieces

    def free(self) -> None:
        """Gives the rooms of pieces that have arrived back."""
        for receive, piece in self._receives:
            self._channel.free(receive, piece)

    def wait(self) -> None:
        """Waits until all parts are in their places, and this rank's are sent."""
        for receive, piece in self._receives:
            arrived = self._channel.arrived(receive, piece)
            if arrived is not piece:
                piece.copy_(arrived)
        self._channel.end_sends(self._sends)
        self.free()


class GatherInRows:
    """A gather under way in two hops: along this rank's row, then along its column.

    Ranks of a row follow one another, so the parts of a row lie side by side, and are
    sent as one block.
    """

    TAGS: ClassVar = _SUM_TAGS
    """The tags of the second hop. Its sends begin after those of verbs that are started
    together with it, so it needs tags of its own.
    """

    def __init__(self, parts_WN: Tensor, own_N: Tensor, channel: HostChannel) -> None:
        rank = channel.rank()
        world = channel.size()
        width = channel.row_width
        begin = rank - rank % width
        row = range(begin, begin + width)
        blocks = parts_WN.view(world // width, -1)
        self._channel = channel
        self._block = blocks[rank // width]
        self._column = [p for p in range(rank % width, world, width) if p != rank]
        self._tag = self.TAGS | self._block.nbytes
        self._works = [
            channel.recv([blocks[peer // width]], peer, self._tag)
            for peer in self._column
        ]
        own = [_bytes(own_N) if peer in row else [] for peer in range(world)]
        arriving = [
            _bytes(part) if peer in row else [] for peer, part in enumerate(parts_WN)
        ]
        self._in_row = Transfer(own, arriving, channel)
        parts_WN[rank].copy_(own_N)

    def wait(self) -> None:
        """Waits until all parts are in their places, and this rank's are sent."""
        self._in_row.wait()
        for peer in self._column:
            self._works.append(self._channel.send([self._block], peer, self._tag))
        for work in self._works:
            work.wait()


def _bytes(piece: Tensor) -> list[Tensor]:
    """The bytes of a piece; none of an empty one."""
    return [piece.view(torch.uint8)] if len(piece) else []


class Sum:
    """Sums of parts under way: ``own[i]`` goes to rank i, which adds up what it gets.

    ``total`` becomes this rank's sum, in the order of gloo's ring. It may be this
    rank's own part. ``gathered`` become the sums of all ranks, ``total`` among them. If
    it is empty, this rank gets no sum of others.
    """

    def __init__(
        self,
        own: Sequence[Tensor],
        total: Tensor,
        gathered: Sequence[Tensor],
        channel: HostChannel,
    ) -> None:
        rank = channel.rank()
        world = len(own)
        self._channel = channel
        self._down = [(rank - away) % world for away in range(1, world)]
        """The other ranks, in the order in which gloo's ring adds up their parts."""
        numels = piece_numels(max(map(len, own)), world, total.itemsize)
        ends = [*accumulate(numels)]
        cuts = [
            slice(end - numel, end) for numel, end in zip(numels, ends, strict=True)
        ]
        self._own = [[part[cut] for part in own] for cut in cuts]
        """The parts of each piece, by rank."""
        self._totals = [total[cut] for cut in cuts]
        self._to = self._down if gathered else []
        """The ranks that get this rank's sum."""
        self._gathers: list[Waits] = []
        for cut in cuts:
            for src in self._to:
                self._gather(gathered[src][cut], src, channel.recv)
        self._pushes: list[Transfer] = []
        for _ in range(max(2, _UNDER_WAY_BYTES // (PIECE_BYTES * world))):
            self._push()

    def _gather(self, sum_C: Tensor, rank: int, move: Callable[..., Waits]) -> None:
        """Sends a sum to another rank, or receives it."""
        if sum_C.numel():
            self._gathers.append(move([sum_C], rank, _SUM_TAGS | sum_C.nbytes))

    def _push(self) -> None:
        """Begins the transfer of the next piece, if there is one."""
        at = len(self._pushes)
        if at == len(self._own):
            return
        own = [_bytes(part) for part in self._own[at]]
        total = self._totals[at]
        arriving = [_bytes(total)] * len(own)
        if len(total) and not self._has_rooms(total):
            for src in self._down:
                arriving[src] = [self._channel.take(total.nbytes)]
        self._pushes.append(Transfer(own, arriving, self._channel, is_awaited=True))

    def wait(self) -> None:
        """Waits until ``total`` and ``gathered`` are sums."""
        for at, total in enumerate(self._totals):
            self._add_up(at)
            self._push()
            for dst in self._to:
                self._gather(total, dst, self._channel.send)
        for work in self._gathers:
            work.wait()

    def _add_up(self, at: int) -> None:
        """Makes this rank's sum of a piece, once the other ranks' parts are here."""
        total = self._totals[at]
        arrived = self._pushes[at].arrived()
        if arrived:
            first, *others = [arrived[src].view(total.dtype) for src in self._down]
            for part in others:
                first.add_(part)
            own = self._own[at][self._channel.rank()]
            torch.add(first, own, out=total)
        self._pushes[at].free()
        if not self._has_rooms(total):
            for memory in arrived.values():
                self._channel.give(memory)

    def _has_rooms(self, total: Tensor) -> bool:
        """Whether parts as long as this sum arrive in rooms."""
        return room_bytes(total.nbytes, self._channel.size()) > 0
