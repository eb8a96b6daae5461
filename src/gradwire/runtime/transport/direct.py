"""Direct transfers: parts go straight to each rank, in place of a ring.

gloo's all-gather passes payloads round a ring of W - 1 hops, and its all-reduce takes
2 (W - 1). Here each rank sends its part to every other at once: the bytes on its link
are the same, and it takes one hop. A sum takes two: each rank adds up a chunk for all,
in rank order, and all gather the chunks. Far away a hop is a latency.

gloo sends a payload only once it has heard that the receive is posted, which costs a
latency more. So receives of small parts are posted ahead. They fill rooms: memory of
the channel's own, as nobody knows yet where the next part is wanted.

No rank's choice of when to post changes which payload fills which receive. gloo matches
sends and receives of one tag in the order in which they began. A part's tag is the size
of its room, which both ends derive from the size of the part. Both ends begin their
parts in the order of verbs. So of two ranks, the k-th part of a tag fills the k-th
receive of this tag, whenever that was posted. A part in a room follows its size, as
parts of other sizes fit in too.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from ...collective.steps.travel import AHEAD_BYTES, NAMES, SIZE_BYTES, is_straight
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
"""Tags from here on are those of direct parts; smaller ones are those of sends."""
_ROOM_TAGS = DIRECT_TAGS | 2**29
"""Tags from here on are those of parts with a room, and hold the size of the room."""
_LEAST_BYTES = 256
"""The size of the smallest rooms."""


class Waits(Protocol):
    """Work under way."""

    def wait(self) -> Any:
        """Waits until it has ended."""


def goes_straight(verb: Communication) -> TypeGuard[Straight]:
    """Whether a verb's parts go straight to each rank, on all ranks alike.

    The rule is ``is_straight``, which planners read too.
    """
    match verb:
        case (
            AllGather(whole) | AllReduce(whole) | AllToAll(whole) | ReduceScatter(whole)
        ):
            return is_straight(NAMES[type(verb)], whole.nbytes)
        case _:
            return False


def room_bytes(part_bytes: int, world: int) -> int:
    """The bytes of the room of a part, a power of two; 0 for a large part without one.

    gloo would end a process that receives more bytes than it has room for.

    >>> room_bytes(3, 4), room_bytes(300, 4), room_bytes(1_000_000, 4)
    (256, 512, 0)
    """
    needed_bytes = SIZE_BYTES + part_bytes
    if needed_bytes * world > AHEAD_BYTES:
        return 0
    return max(_LEAST_BYTES, 1 << (needed_bytes - 1).bit_length())


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
    """A part that is sent: its work, and the room that it leaves from, if any."""

    work: Waits
    room: Tensor | None


class OtherSize(RankFailed):
    """A part that arrived has another size than the one that was wanted.

    ``src`` is its sender's place in the verb's group.
    """

    def __init__(self, src: int, message: str) -> None:
        super().__init__(message, exit_code=ExitCode.BROKEN)
        self.src = src


class HostChannel(ProcessGroupGloo):
    """gloo among hosts, with receives that are posted before parts are wanted.

    As many receives of a tag wait ahead as are in use at once. A verb posts receives of
    the next verb when it begins, so their notes are there in time. A receive that
    nothing fills waits until the channel closes, and its errors show only where it is
    used: ranks may close their channels one after another.

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
        self._free: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        """The rooms whose receives have ended, by the same key."""
        self._free_outgoing: dict[int, list[Tensor]] = defaultdict(list)
        """The rooms whose sends have ended, by their size."""
        self.ahead_bytes = 0
        """Bytes of all rooms of receives, which serve again and again."""

    def begin_sends(self, parts: Mapping[int, Tensor]) -> list[Sent]:
        """Sends each part to the rank that is its key."""
        rooms: dict[int, Tensor] = {}
        sends = []
        for dst, part in parts.items():
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
        free = self._free_outgoing[size_bytes]
        room = free.pop() if free else _memory(size_bytes)
        room[:SIZE_BYTES] = _size(part.nbytes)
        room[SIZE_BYTES : SIZE_BYTES + part.nbytes] = part.view(torch.uint8)
        return room

    def end_sends(self, sends: Sequence[Sent]) -> None:
        """Waits until parts are sent, and frees their rooms."""
        rooms: dict[int, Tensor] = {}
        for work, room in sends:
            work.wait()
            if room is not None:
                rooms[id(room)] = room
        for room in rooms.values():
            self._free_outgoing[room.nbytes].append(room)

    def begin_receive(self, src: int, part: Tensor, *, is_awaited: bool) -> Receive:
        """The receive of the next part from ``src``, which has the size of ``part``.

        A large part fills ``part`` itself, and any other fills a room. ``is_awaited``
        says whether ``src`` waits for a part that is sent from here after this call.
        Only then receives are posted ahead: ``src`` cannot close before it has their
        notes. A note to a closed rank makes TCP drop the parts that are still on their
        way from there.
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
        # a rank that has left sends no more: an error once its part is wanted
        with suppress(RuntimeError):
            while self._free[key] or len(ahead) < self._num_used[key]:
                ahead.append(self._post(src, self._room(key)))

    def arrived(self, receive: Receive, part: Tensor) -> Tensor:
        """Waits for the bytes of ``part``; returns them, which may lie in a room.

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
    """The tag of a part without a room: it meets a receive of its size alone."""
    return DIRECT_TAGS | min(part.nbytes, 2**29 - 1)


def begin_straight(verb: Straight, channel: HostChannel) -> Waits:
    """Sends a verb's parts to all others; returns what waits for theirs.

    Args:
        verb: A verb on host memory.
        channel: The process group of gloo that carries it.
    """
    world = channel.size()
    match verb:
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
            chunks = buf.view(-1).tensor_split(world)
            return Sum(chunks, chunks[channel.rank()], chunks, channel)


def _exchange(
    own: Sequence[Tensor], arriving: Sequence[Tensor], channel: HostChannel
) -> Transfer:
    """A transfer, with the part that this rank keeps."""
    transfer = Transfer(own, arriving, channel)
    rank = channel.rank()
    arriving[rank].copy_(own[rank].view_as(arriving[rank]))
    return transfer


class Transfer:
    """Parts under way: ``own[i]`` goes to rank i, and what it sends has the size of
    ``arriving[i]``.

    Receives begin first, as gloo sends only what a receive waits for.
    """

    def __init__(
        self, own: Sequence[Tensor], arriving: Sequence[Tensor], channel: HostChannel
    ) -> None:
        rank = channel.rank()
        world = len(own)
        others = [(rank + away) % world for away in range(1, world)]
        self._channel = channel
        self._receives: list[tuple[Receive, Tensor]] = []
        for src in others:
            if arriving[src].numel():
                part = arriving[src].view(torch.uint8)
                is_awaited = own[src].numel() > 0
                receive = channel.begin_receive(src, part, is_awaited=is_awaited)
                self._receives.append((receive, part))
        self._sends = channel.begin_sends(
            {dst: own[dst] for dst in reversed(others) if own[dst].numel()}
        )

    def arrived(self) -> dict[int, Tensor]:
        """The bytes of all parts by their sender, once they and this rank's are over.

        They may lie in rooms, which ``free`` gives back.
        """
        bytes_of = {
            receive.src: self._channel.arrived(receive, part)
            for receive, part in self._receives
        }
        self._channel.end_sends(self._sends)
        return bytes_of

    def free(self) -> None:
        """Gives the rooms of parts that have arrived back."""
        for receive, part in self._receives:
            self._channel.free(receive, part)

    def wait(self) -> None:
        """Waits until all parts are in their places, and this rank's are sent."""
        bytes_of = self.arrived()
        for receive, part in self._receives:
            if bytes_of[receive.src] is not part:
                part.copy_(bytes_of[receive.src])
        self.free()


class Sum:
    """Sums of parts under way: ``own[i]`` goes to rank i, which adds up what it gets.

    ``total`` becomes this rank's sum, in rank order. It may be this rank's own part.
    ``gathered`` are then the sums of all ranks; without them this rank has its own.
    """

    def __init__(
        self,
        own: Sequence[Tensor],
        total: Tensor,
        gathered: Sequence[Tensor],
        channel: HostChannel,
    ) -> None:
        self._own = own
        self._total = total
        self._gathered = gathered
        self._channel = channel
        has_rooms = room_bytes(total.nbytes, len(own)) > 0
        arriving = [total if has_rooms else torch.empty_like(total) for _ in own]
        self._push = Transfer(own, arriving, channel)

    def wait(self) -> None:
        """Waits until all elements are sums."""
        total = self._total
        rank = self._channel.rank()
        parts = {
            src: part.view(total.dtype) for src, part in self._push.arrived().items()
        }
        if parts:
            # Both places are a part's that has arrived, or the total's at the end.
            room = parts[min(parts)]
            parts[rank] = self._own[rank]
            first, *middle, last = [parts[src] for src in sorted(parts)]
            for part in middle:
                first = torch.add(first, part, out=room)
            torch.add(first, last, out=total)
        self._push.free()
        if self._gathered:
            own = [total] * len(self._gathered)
            Transfer(own, self._gathered, self._channel).wait()
