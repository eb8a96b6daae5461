"""Staging: payloads of a device on their way through host memory, where gloo sends from.

All copies between a device and the network are made here. A message has one pinned buffer, as large
as the largest of its verbs has needed, which it keeps from step to step. Payloads alone are copied,
on the side stream of their device, and the host waits for a copy only in the thread that then sends
it. What lies in host memory already, as sizes do that ranks tell each other, goes as it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ...contract.verbs import AllGather, AllReduce, Broadcast, Communication, Recv, Send
from .devices import Accelerator, Event, Stream

_ALIGNED_BYTES = 64


@dataclass
class Staging:
    """The pinned buffers of one rank by message, and how many bytes it has copied so far."""

    to_host_bytes: int = 0
    to_device_bytes: int = 0
    offloaded_bytes: int = 0  # those of ``to_host_bytes`` that the host has encoded; see `Offload`
    _kept: dict[Hashable, Tensor] = field(default_factory=dict)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are kept."""
        return sum(kept.numel() for kept in self._kept.values())

    def clear(self) -> None:
        """Gives all buffers back, as other messages will take their place."""
        self._kept.clear()

    def out(
        self,
        message: int,
        verbs: Sequence[Communication],
        ranks: Sequence[int],
        kind: Accelerator,
        stream: Stream,
    ) -> Staged | None:
        """Launches the copies of what a message's verbs send; None where all lies on the host.

        ``ranks`` are this one's places among those that each verb is for. Copies are launched on
        ``stream``, where what is sent was computed.
        """
        places = [
            (at, name, *_ways(verb, name, rank))
            for at, (verb, rank) in enumerate(zip(verbs, ranks, strict=True))
            for name in ("buf", "out")
            if (tensor := getattr(verb, name, None)) is not None and not tensor.is_cpu
        ]
        if not places:
            return None
        held = [getattr(verbs[at], name) for at, name, _, _ in places]
        rooms = self.rooms(message, held, kind)
        taken: list[dict[str, Any]] = [{} for _ in verbs]
        staged = Staged(self, kind, stream)
        with kind.use(stream):
            for (at, name, is_read, is_written), tensor, room in zip(
                places, held, rooms, strict=True
            ):
                taken[at][name] = room
                if is_read:
                    room.copy_(tensor, non_blocking=True)
                    self.to_host_bytes += room.nbytes
                if is_written:
                    staged.landing += _others(verbs[at], ranks[at], tensor, room)
            staged.ready = kind.record(stream)
        staged.verbs = [replace(verb, **own) for verb, own in zip(verbs, taken, strict=True)]
        return staged

    def rooms(self, key: Hashable, tensors: Sequence[Tensor], kind: Accelerator) -> list[Tensor]:
        """Room for each tensor in the buffer of ``key``, which grows where it has too little."""
        ends, end = [], 0
        for tensor in tensors:
            end += -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
            ends.append(end)
        kept = self._kept.get(key)
        if kept is None or kept.numel() < end:
            # Sizes that vary soon fit: each time there is a quarter more than was needed.
            kept = self._kept[key] = kind.pinned(end if kept is None else end + end // 4)
        starts = [0, *ends]
        return [
            kept[start : start + tensor.nbytes].view(tensor.dtype)
            for start, tensor in zip(starts, tensors, strict=False)
        ]


@dataclass
class Staged:
    """Verbs on pinned memory in the place of others; ``ready`` is when it holds what is sent."""

    staging: Staging
    kind: Accelerator
    stream: Stream
    verbs: list[Any] = field(default_factory=list)
    landing: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    ready: Event = None

    def wait(self) -> None:
        """Has this thread wait until the verbs may be carried out.

        All that was copied from the buffer before has been copied by then too.
        """
        self.ready.synchronize()

    def back(self) -> None:
        """Launches the copies of what has arrived to where it belongs."""
        with self.kind.use(self.stream):
            for tensor, room in self.landing:
                tensor.copy_(room, non_blocking=True)
                self.staging.to_device_bytes += room.nbytes


def _others(
    verb: Communication, rank: int, into: Tensor, room: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of what is copied back; of all that is gathered this rank's own part is there."""
    if not isinstance(verb, AllGather):
        return [(into, room)]
    start, stop = rank * verb.buf.numel(), (rank + 1) * verb.buf.numel()
    into[start:stop].copy_(verb.buf, non_blocking=True)
    return [(into[:start], room[:start]), (into[stop:], room[stop:])]


def _ways(verb: Communication, name: str, rank: int) -> tuple[bool, bool]:
    """Whether a verb reads one of its tensors, and whether it writes it."""
    if isinstance(verb, Send):
        return True, False
    if isinstance(verb, Recv):
        return False, True
    if isinstance(verb, Broadcast):
        return verb.src == rank, verb.src != rank
    if isinstance(verb, AllReduce):
        return True, True
    return name == "buf", name == "out"
