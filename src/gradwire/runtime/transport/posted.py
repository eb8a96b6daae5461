"""Posted receives: parts go straight to each rank, and receives wait for them.

gloo's all-gather passes payloads round a ring of W - 1 hops, and its all-reduce takes
2 (W - 1). Here each rank sends its part to every other rank at once. This takes one hop
for the same bytes on each link. A sum takes two hops: each rank adds up one chunk, in
rank order, and all gather the chunks.

gloo sends a payload only once it has heard that the receive is posted. This note costs
one latency, unless the receive was posted early enough. If a verb's sizes stayed the
same, this step therefore posts the receives of the next step at its end. They fill
memory of their own, as nobody knows yet where the next step wants its bytes.

Each rank chooses by itself when to post. The choice changes when a payload sets out,
and not which payload meets which receive. A transfer's tag holds its place in the step,
the number of uses of this place, and its size. A receive of another size meets nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ...collective.steps.rounds import ROOM_BYTES
from ...contract.verbs import AllGather, AllReduce, AllToAll, Communication

Straight = AllGather | AllReduce | AllToAll
"""The verbs whose parts may go straight to each rank."""

EARLY_BYTES = 2**20
"""Bytes of one verb, at most, whose receives are posted a step ahead.

Larger receives would hold much memory, to save a latency that hardly matters to them.
"""
_OWN_TAGS = 2**30
"""Tags from here on are those of direct parts; smaller ones are sizes of sends."""


def goes_straight(verb: Communication) -> TypeGuard[Straight]:
    """Whether a verb's parts go straight to each rank, on all ranks alike.

    gloo's all-to-all sends all parts at once as well. Large gathers and sums keep to
    the ring, whose links have one sender each.
    """
    match verb:
        case AllToAll():
            return True
        case AllGather(whole) | AllReduce(whole):
            return whole.nbytes <= ROOM_BYTES
        case _:
            return False


@dataclass(slots=True)
class _Place:
    """One verb of a message, step after step."""

    num_uses: int = 0
    varies: bool = False
    """Whether its sizes have changed from one step to the next."""
    early: dict[int, Receive] = field(default_factory=dict)
    """The receives that were posted for the next use, by the rank that sends."""


@dataclass(frozen=True, slots=True)
class Receive:
    """A receive under way: the bytes it fills, and its work."""

    memory: Tensor
    work: Any


class PostedReceives:
    """The direct transfers of one channel.

    Args:
        channel: the process group that carries them, of gloo.
        rank: this rank's place in it.
        world: its number of ranks.
    """

    def __init__(self, channel: Any, rank: int, world: int) -> None:
        self._channel = channel
        self._rank = rank
        self._others = [(rank + away) % world for away in range(1, world)]
        self._places: dict[str, _Place] = {}
        # they stay here: gloo may access their memory until the channel closes
        self._unmet: list[Receive] = []

    def start(self, verb: Straight, name: str) -> Transfer | Sum:
        """Sends a verb's parts to all others; returns the transfer, to wait for.

        Args:
            verb: a verb on host memory.
            name: the verb's place in a step, the same on all ranks.
        """
        world = len(self._others) + 1
        match verb:
            case AllGather(out, buf):
                return self.send([buf] * world, out.view(world, -1).unbind(), name)
            case AllToAll(out, buf, out_sizes, in_sizes):
                arriving = torch.split(out, [*out_sizes])
                return self.send(torch.split(buf, [*in_sizes]), arriving, name)
            case AllReduce(buf):
                return Sum(self, buf.tensor_split(world), self._rank, name)

    def send(
        self, own: Sequence[Tensor], arriving: Sequence[Tensor], name: str
    ) -> Transfer:
        """Sends ``own[i]`` to rank i; the part from rank i fills ``arriving[i]``."""
        place = self._places.setdefault(name, _Place())
        wanted = {
            src: arriving[src].view(torch.uint8)
            for src in self._others
            if arriving[src].numel()
        }
        early = place.early
        place.early = {}
        received = {}
        for src, part in wanted.items():
            posted = early.get(src)
            if posted is not None and posted.memory.nbytes == part.nbytes:
                received[src] = early.pop(src)
            else:
                received[src] = self._post(name, place, src, part)
        place.varies |= bool(early)
        self._unmet += early.values()
        sends = [
            self._channel.send([own[dst]], dst, _tag(name, place.num_uses, own[dst]))
            for dst in reversed(self._others)
            if own[dst].numel()
        ]
        arriving[self._rank].copy_(own[self._rank])
        return Transfer(self, name, place, wanted, received, sends)

    def post_next(
        self,
        name: str,
        place: _Place,
        received: Mapping[int, Receive],
        wanted: Mapping[int, Tensor],
    ) -> None:
        """Posts the receives of a verb's next use, if its sizes seem to stay."""
        place.num_uses += 1
        size_bytes = sum(part.nbytes for part in wanted.values())
        if place.varies or size_bytes > EARLY_BYTES:
            return
        for src, part in wanted.items():
            memory = received[src].memory
            if memory is part:
                memory = torch.empty_like(part)
            place.early[src] = self._post(name, place, src, memory)

    def _post(self, name: str, place: _Place, src: int, memory: Tensor) -> Receive:
        tag = _tag(name, place.num_uses, memory)
        return Receive(memory, self._channel.recv([memory], src, tag))

    def clear(self) -> None:
        """Drops all posted receives, before the channel is closed."""
        self._places.clear()
        self._unmet.clear()


@dataclass(slots=True)
class Transfer:
    """A verb that is under way."""

    receives: PostedReceives
    name: str
    place: _Place
    wanted: Mapping[int, Tensor]
    received: Mapping[int, Receive]
    sends: Sequence[Any]

    def wait(self) -> None:
        """Waits until all parts are here, and this rank's are sent."""
        for receive in self.received.values():
            receive.work.wait()
        for src, part in self.wanted.items():
            memory = self.received[src].memory
            if memory is not part:
                part.copy_(memory)
        self.receives.post_next(self.name, self.place, self.received, self.wanted)
        for work in self.sends:
            work.wait()


class Sum:
    """A sum over ranks that is under way: chunks are pushed, added up and gathered."""

    def __init__(
        self, receives: PostedReceives, chunks: Sequence[Tensor], rank: int, name: str
    ) -> None:
        self._receives = receives
        self._chunks = chunks
        self._own_C = chunks[rank]
        self._name = name
        self._parts = [torch.empty_like(self._own_C) for _ in chunks]
        self._push = receives.send(chunks, self._parts, f"{name} push")
        self._pull: Transfer | None = None

    def wait(self) -> None:
        """Waits until all elements are sums."""
        (self._pull or self.add_up()).wait()

    def add_up(self) -> Transfer:
        """Waits for the own chunk of all ranks, and sends its sum to all others."""
        self._push.wait()
        first_C, *others = self._parts
        self._own_C.copy_(first_C)
        for part_C in others:
            self._own_C.add_(part_C)
        own = [self._own_C] * len(self._chunks)
        self._pull = self._receives.send(own, self._chunks, f"{self._name} pull")
        return self._pull


def _tag(name: str, use: int, part: Tensor) -> int:
    """A number of 31 bits by which a part meets its receive and no other's."""
    digest = zlib.crc32(f"{name} {use} {part.nbytes}".encode())
    return _OWN_TAGS | digest % _OWN_TAGS
