"""Checksums: what arrives is compared with what was sent before anything reads it.

Beside each verb travels one more of the same kind, with a CRC-32 for each payload, 8 bytes each. A
payload is on its way while its sender takes its CRC-32, so a link that is slower than memory does
not wait. Where a payload does not fit, the error names the rank that it comes from; its memory, the
link and any rank that passes it on can be at fault.

A library's sums (all-reduce, reduce-scatter) have no payload that arrives as it was sent. Nor is
what a device sends by itself (NCCL) in reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract.verbs import AllGather, AllToAll, Broadcast, Communication, Recv, Send
from ...errors import ExitCode, RankFailed
from ...kernels.crc import crc32


class Position(NamedTuple):
    """This rank's place among the ``world`` ranks that a verb is for, and their numbers.

    Ranks that hold other shards have none here, and ``ranks`` is empty.
    """

    rank: int
    world: int
    ranks: Sequence[int]


class Seals:
    """The verbs ``beside`` those of a task in ``step``, None beside a library's sum."""

    def __init__(
        self,
        verbs: Sequence[Communication],
        places: Sequence[tuple[int, int, Sequence[int]]],
        step: int = -1,
    ) -> None:
        self._places, self._step = [Position(*place) for place in places], step
        pairs = zip(verbs, self._places, strict=True)
        self.beside = [_beside(verb, place.world) for verb, place in pairs]

    def written(self, verbs: Sequence[Communication]) -> Iterator[tuple[int, Communication]]:
        """The verbs beside ``verbs``, filled in, each with the index of the verb that it is for."""
        for at, (verb, one) in enumerate(zip(verbs, self.beside, strict=True)):
            if one is not None:
                for to, part in enumerate(_sent(verb, self._places[at].rank)):
                    one.buf[to] = crc32(part)
                yield at, one

    def check(self, verbs: Sequence[Communication]) -> None:
        """Raises ``RankFailed``, which names the sender, if anything arrived that was not sent."""
        for verb, one, place in zip(verbs, self.beside, self._places, strict=True):
            if one is None:
                continue
            told = getattr(one, "out", one.buf).tolist()
            for src, part in _arrived(verb, place).items():
                if crc32(part) != told[src if len(told) > 1 else 0]:
                    raise self._refusal(type(verb).__name__, src, place, part.nbytes)

    def _refusal(self, kind: str, src: int, place: Position, size_bytes: int) -> RankFailed:
        who = f"rank {place.ranks[src]}" if place.ranks else f"the rank with shard {src}"
        here = f"rank {place.ranks[place.rank]}" if place.ranks else f"shard {place.rank}"
        return RankFailed(
            f"the {size_bytes} bytes that {who} sent arrived damaged at {here} ({kind}): memory or "
            f"a link of {who} changes bits",
            ranks=tuple(place.ranks[src : src + 1]),
            step=self._step,
            exit_code=ExitCode.BITS,
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
        case Broadcast(src, _, among):
            return Broadcast(src, room(1), among)
        case AllGather(_, _, among):
            return AllGather(room(world), room(1), among)
        case AllToAll(_, _, _, _, among):
            return AllToAll(room(world), room(world), ones, ones, among)
    return None


def _sent(verb: Communication, rank: int) -> Sequence[Tensor]:
    """The payloads that this rank sends."""
    match verb:
        case AllToAll(_, buf, _, in_sizes):
            return torch.split(buf, list(in_sizes))
        case Send(_, buf) | AllGather(_, buf):
            return [buf]
        case Broadcast(src, buf) if src == rank:
            return [buf]
    return []


def _arrived(verb: Communication, place: Position) -> dict[int, Tensor]:
    """The payloads that this rank is sent, by the place of the sender; it may be one of them."""
    match verb:
        case Recv(src, buf):
            return {src: buf}
        case Broadcast(src, buf) if src != place.rank:
            return {src: buf}
        case AllGather(out, buf):
            sizes = [buf.numel()] * place.world
        case AllToAll(out, _, out_sizes, _):
            sizes = list(out_sizes)
        case _:
            return {}
    return dict(enumerate(torch.split(out, sizes)))
