"""Direct transfers: parts go straight to each rank, in place of a ring.

gloo's all-gather passes payloads round a ring of W - 1 hops, and its all-reduce takes
2 (W - 1). Here each rank sends its part to every other at once: the bytes on its link
are the same, and it takes one hop. A sum takes two: each rank adds up a chunk for all,
in rank order, and all gather the chunks. Far away a hop is a latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from ...collective.steps.travel import NAMES, is_straight
from ...contract.verbs import AllGather, AllReduce, AllToAll, Communication

Straight = AllGather | AllReduce | AllToAll
"""The verbs whose parts may go straight to each rank."""
DIRECT_TAGS = 2**30
"""Tags from here on are those of direct parts; smaller ones are those of sends."""


class Waits(Protocol):
    """Work under way."""

    def wait(self) -> Any:
        """Waits until it has ended."""


def goes_straight(verb: Communication) -> TypeGuard[Straight]:
    """Whether a verb's parts go straight to each rank, on all ranks alike.

    The rule is ``is_straight``, which planners read too.
    """
    match verb:
        case AllGather(whole) | AllReduce(whole) | AllToAll(whole):
            return is_straight(NAMES[type(verb)], whole.nbytes)
        case _:
            return False


def _tag(part: Tensor) -> int:
    """The tag of a part: it meets a receive of its size alone.

    gloo would end a process that receives more bytes than it has room for.
    """
    return DIRECT_TAGS | part.nbytes % DIRECT_TAGS


def begin_straight(verb: Straight, channel: Any) -> Waits:
    """Sends a verb's parts to all others; returns what waits for theirs.

    Args:
        verb: a verb on host memory.
        channel: the process group of gloo that carries it.
    """
    world = channel.size()
    match verb:
        case AllGather(out, buf):
            return Transfer([buf] * world, out.view(world, -1).unbind(), channel)
        case AllToAll(out, buf, out_sizes, in_sizes):
            own = torch.split(buf, [*in_sizes])
            return Transfer(own, torch.split(out, [*out_sizes]), channel)
        case AllReduce(buf):
            return Sum(buf.view(-1).tensor_split(world), channel)


class Transfer:
    """Parts under way: ``own[i]`` goes to rank i, and what it sends fills
    ``arriving[i]``.

    Receives begin first, as gloo sends only what a receive waits for.
    """

    def __init__(
        self, own: Sequence[Tensor], arriving: Sequence[Tensor], channel: Any
    ) -> None:
        rank = channel.rank()
        world = len(own)
        others = [(rank + away) % world for away in range(1, world)]
        self._works = [
            channel.recv([arriving[src]], src, _tag(arriving[src]))
            for src in others
            if arriving[src].numel()
        ]
        self._works += [
            channel.send([own[dst]], dst, _tag(own[dst]))
            for dst in reversed(others)
            if own[dst].numel()
        ]
        arriving[rank].copy_(own[rank].view_as(arriving[rank]))

    def wait(self) -> None:
        """Waits until all parts are here, and this rank's are sent."""
        for work in self._works:
            work.wait()


class Sum:
    """A sum over ranks that is under way: chunks are pushed, added up and gathered."""

    def __init__(self, chunks: Sequence[Tensor], channel: Any) -> None:
        self._chunks = chunks
        self._channel = channel
        self._own_C = chunks[channel.rank()]
        self._parts = [torch.empty_like(self._own_C) for _ in chunks]
        self._push = Transfer(chunks, self._parts, channel)

    def wait(self) -> None:
        """Waits until all elements are sums."""
        self._push.wait()
        first_C, *others = self._parts
        self._own_C.copy_(first_C)
        for part_C in others:
            self._own_C.add_(part_C)
        own = [self._own_C] * len(self._chunks)
        Transfer(own, self._chunks, self._channel).wait()
