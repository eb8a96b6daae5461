"""Checksums: payloads that arrive are checked before any code reads them.

Beside each verb travels one more of the same kind, with a frame for each payload, 8
bytes each: the version of what ranks send, and a CRC-32. Without checksums payloads
have no frame, as ranks have compared versions before they connected. A payload is on
its way while its sender takes its CRC-32, so a link that is slower than memory does not
wait. Where a payload does not fit, the error names the rank that it comes from, whose
memory or link is at fault.

So that there is one such rank, nothing is passed on or added up by a library: gathers,
broadcasts and sums go from rank to rank (``pairwise``), and sums are made here. What a
device sends by itself (NCCL) is out of reach.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ...contract.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Communication,
    Compute,
    Recv,
    ReduceScatter,
    Send,
    Steps,
    rewritten,
)
from ...errors import ExitCode, RankFailed
from ...kernels.crc import crc32
from ...version import WIRE

T = TypeVar("T")
_SHARED = AllReduce | AllGather | ReduceScatter | Broadcast
_CRC_BITS = 32


class Position(Protocol):
    """This rank's place among a verb's ``world`` ranks, and their numbers.

    Ranks that hold other shards have none here, and ``ranks`` is empty.
    """

    rank: int
    world: int
    ranks: Sequence[int]


class Seals:
    """The verbs ``beside`` a task's in ``step``, None beside any not ``pairwise``.

    ``places`` are this rank's, one for each verb.
    """

    def __init__(
        self,
        verbs: Sequence[Communication],
        places: Sequence[Position],
        step: int = -1,
    ) -> None:
        self._places = places
        self._step = step
        pairs = zip(verbs, places, strict=True)
        self.beside = [_beside(verb, place.world) for verb, place in pairs]

    def written(
        self, verbs: Sequence[Communication]
    ) -> Iterator[tuple[int, Communication]]:
        """The verbs beside ``verbs``, filled in, each with the index of the verb that
        it is for.
        """
        for at, (verb, one) in enumerate(zip(verbs, self.beside, strict=True)):
            if one is not None:
                for to, part in enumerate(_sent(verb)):
                    one.buf[to] = frame(part, WIRE)
                yield at, one

    def check(self, verbs: Sequence[Communication]) -> None:
        """Raises ``RankFailed`` if anything arrived that was not sent.

        The error names the sender.
        """
        for verb, one, place in zip(verbs, self.beside, self._places, strict=True):
            if one is None:
                continue
            announced = getattr(one, "out", one.buf).tolist()
            for at, (src, part) in enumerate(_arrived(verb)):
                if frame(part, WIRE) != announced[at]:
                    kind = type(verb).__name__
                    raise self._refusal(kind, src, place, part, announced[at])

    def damaged(self, verb: Communication, at: int, src: int) -> RankFailed:
        """The error of a part whose size is not the one that its sender counts."""
        place = self._places[at]
        who, here = _names(place, src)
        kind = type(verb).__name__
        text = (
            f"the size of a part that {who} sent arrived damaged at {here} ({kind}): "
            f"memory or a link of {who} changes bits"
        )
        return self._failure(text, place, src, ExitCode.BITS)

    def _refusal(
        self, kind: str, src: int, place: Position, part: Tensor, announced: int
    ) -> RankFailed:
        who, here = _names(place, src)
        code = ExitCode.BITS
        text = (
            f"the {part.nbytes} bytes that {who} sent arrived damaged at {here} "
            f"({kind}): memory or a link of {who} changes bits"
        )
        other = announced >> _CRC_BITS
        if other > 0 and announced == frame(part, other):
            code = ExitCode.MISTAKE
            text = (
                f"{who} sends payloads of wire version {other}, and {here} takes "
                f"{WIRE}; start all ranks with one version of gradwire"
            )
        return self._failure(text, place, src, code)

    def _failure(self, text: str, place: Position, src: int, code: int) -> RankFailed:
        ranks = tuple(place.ranks[src : src + 1])
        return RankFailed(text, ranks=ranks, step=self._step, exit_code=code)


def _names(place: Position, src: int) -> tuple[str, str]:
    """The words for the rank that sent, and for this one."""
    if place.ranks:
        return f"rank {place.ranks[src]}", f"rank {place.ranks[place.rank]}"
    return f"the rank with shard {src}", f"shard {place.rank}"


def frame(payload: Tensor, version: int) -> int:
    """The frame of a payload: the wire's version above its CRC-32.

    The version takes part in the lower half too: a bit that flips in it makes no other
    version.
    """
    return version << _CRC_BITS | crc32(payload) ^ zlib.crc32(
        version.to_bytes(8, "little")
    )


def _beside(verb: Any, world: int) -> Any:
    def room(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device="cpu")

    ones = (1,) * world
    match verb:
        case Send(dst, _, among):
            return Send(dst, room(1), among)
        case Recv(src, _, among):
            return Recv(src, room(1), among)
        case AllToAll(_, _, _, _, among):
            return AllToAll(room(world), room(world), ones, ones, among)
    return None


def _sent(verb: Communication) -> Sequence[Tensor]:
    """The payloads that this rank sends."""
    match verb:
        case AllToAll(_, buf, _, in_sizes):
            return torch.split(buf, list(in_sizes))
        case Send(_, buf):
            return [buf]
    return []


def _arrived(verb: Communication) -> Sequence[tuple[int, Tensor]]:
    """The payloads sent to this rank, each with its sender, maybe this rank."""
    match verb:
        case Recv(src, buf):
            return [(src, buf)]
        case AllToAll(out, _, out_sizes):
            return [*enumerate(torch.split(out, list(out_sizes)))]
    return []


def pairwise(
    steps: Steps[T], place_of: Callable[[Communication], Position | None]
) -> Steps[T]:
    """Steps whose payloads go straight from sender to receiver.

    Its sums are made in rank order, each element's on one rank, and have the same bits
    everywhere. Ranks send as many bytes as before, but for the source of a broadcast,
    which sends to each itself. Verbs for which ``place_of`` is None stay as they are.
    """

    def each(asked: Any) -> Steps[Any]:
        verbs = asked if isinstance(asked, tuple) else (asked,)
        places = [
            place_of(verb) if isinstance(verb, _SHARED) else None for verb in verbs
        ]
        if not any(places):
            return (yield asked)
        ways = {
            i: _straight(*one) for i, one in enumerate(zip(verbs, places, strict=True))
        }
        results: dict[int, Any] = dict.fromkeys(ways)
        while ways:
            asks: dict[int, Any] = {}
            for i, way in [*ways.items()]:
                try:
                    asks[i] = way.send(results[i])
                except StopIteration as stop:
                    results[i] = stop.value
                    del ways[i]
            if asks:
                results.update(zip(asks, (yield tuple(asks.values())), strict=True))
        return tuple(results.values()) if isinstance(asked, tuple) else results[0]

    return rewritten(steps, each)


def _straight(verb: Any, place: Position | None) -> Steps[Any]:
    if place is None or not verb.buf.numel():
        return (yield verb)
    buf = verb.buf
    rank = place.rank
    world = place.world
    among = verb.among
    size = buf.numel()
    nothing = (0,) * world
    match verb:
        case AllGather(out):
            yield AllToAll(
                out, buf.repeat(world), (size,) * world, (size,) * world, among
            )
        case Broadcast(src) if src == rank:
            sizes = tuple(size * (i != rank) for i in range(world))
            yield AllToAll(buf[:0], buf.repeat(world - 1), nothing, sizes, among)
        case Broadcast(src):
            sizes = tuple(size * (i == src) for i in range(world))
            yield AllToAll(buf, buf[:0], sizes, nothing, among)
        case _:
            sizes = tuple(size // world + (i < size % world) for i in range(world))
            own = (sizes[rank],) * world
            parts = buf.new_empty(sum(own))
            yield AllToAll(parts, buf, own, sizes, among)
            first, *others = torch.split(parts, own[0]) if own[0] else [parts] * world

            def add() -> None:
                for one in others:
                    first.add_(one)
                if isinstance(verb, ReduceScatter):
                    verb.out.copy_(first)

            yield Compute("merge", add, size)
            if isinstance(verb, AllReduce):
                yield AllToAll(buf, first.repeat(world), sizes, own, among)
    return None
