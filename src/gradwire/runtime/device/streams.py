"""Streams: where the compute lane's work is done for gradients that a device computes.

Autograd launches a gradient's kernels on the stream that is current in its thread, and
goes on before they have run. So an event is recorded on that stream where a gradient is
handed in. A message is gathered, encoded, decoded and scattered on the one
``SideStream`` of its device, behind the events of its gradients: behind these kernels,
and not behind kernels that were launched since. Its own work ends with an event too,
and the stream that uses a mean waits for this event. The host waits for neither event.

A message that is encoded on the host, of gradients that a device computes, copies them
``behind`` their events and waits for the copies.

Memory is used again without a wait where its own stream is behind all who used it.
Gradients are their producers', who wait for the end of the message before they go on.
What the side stream makes for itself only it uses.

Gradients in host memory get no event, and cost nothing.

**Offload.** One tensor of a device may be encoded by the host from pinned memory.
Source: SSFusion (ICDE 2026), section IV-C, steps 2 and 3: the gradient is copied to
host memory
    that is kept, without a wait; a thread of its own selects from it; what it has
    selected is copied back without a wait.
Differences: it is the sum of residual and gradient that is copied, so the residual
    stays on the device. The copies take the device's side stream, on which all that is
    computed of gradients is in order.
The copy out is launched by the thread of the backward pass, behind the gradient's
event. The lane ``OFFLOAD`` waits for it, so the compute lane goes on to launch other
messages' work.

**Staging.** Payloads of a device pass through host memory, where gloo sends from. All
copies between a device and the network are made here. A message has one pinned buffer,
as large as the largest of its verbs has needed, which it keeps from step to step.
Payloads alone are copied, on the side stream of their device, and the host waits for a
copy only in the thread that then sends it. What lies in host memory already, as
announced sizes do, goes as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...contract import Copies
from ...contract.verbs import AllGather, AllReduce, Broadcast, Communication, Recv, Send
from ...errors import InvalidSetting
from .devices import Accelerator, Event, Stream, kind_of, side_stream

_ALIGNED_BYTES = 64


@dataclass
class Staging:
    """One rank's pinned buffers by message, and the bytes that it has copied so far."""

    to_host_bytes: int = 0
    to_device_bytes: int = 0
    offloaded_bytes: int = 0
    """The bytes of tensors that the host has encoded; see `Offload`."""
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
        """Launches the copies of what a message's verbs send.

        None where all lies on the host.

        ``ranks`` are this one's places among those that each verb is for. Copies are
        launched on ``stream``, where what is sent was computed.
        """
        tensors = [
            (at, name, tensor)
            for at, verb in enumerate(verbs)
            for name in ("buf", "out")
            if (tensor := getattr(verb, name, None)) is not None and not tensor.is_cpu
        ]
        if not tensors:
            return None
        rooms = self.rooms(message, [tensor for _, _, tensor in tensors], kind)
        staged = Staged(self, kind, stream, [*verbs])
        with kind.use(stream):
            for (at, name, tensor), room in zip(tensors, rooms, strict=True):
                verb = verbs[at]
                is_read, is_written = _ways(verb, name, ranks[at])
                staged.verbs[at] = replace(staged.verbs[at], **{name: room})
                if is_read:
                    room.copy_(tensor, non_blocking=True)
                    self.to_host_bytes += room.nbytes
                if is_written:
                    staged.landing += _others(verb, ranks[at], tensor, room)
            staged.ready = kind.record(stream)
        return staged

    def rooms(
        self, key: Hashable, tensors: Sequence[Tensor], kind: Accelerator
    ) -> list[Tensor]:
        """Room for each tensor in the buffer of ``key``, which grows if too small."""
        ends = []
        end = 0
        for tensor in tensors:
            end += -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
            ends.append(end)
        kept = self._kept.get(key)
        if kept is None or kept.numel() < end:
            # Sizes that vary soon fit: a buffer that grows gets a quarter more.
            spare = 0 if kept is None else end // 4
            kept = self._kept[key] = kind.pinned(end + spare)
        starts = [0, *ends]
        return [
            kept[start : start + tensor.nbytes].view(tensor.dtype)
            for start, tensor in zip(starts, tensors, strict=False)
        ]


@dataclass
class Staged:
    """Verbs on pinned memory in the place of others.

    ``ready`` is when it holds what is sent.
    """

    staging: Staging
    kind: Accelerator
    stream: Stream
    verbs: list[Any]
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
    """Pairs to copy back, without this rank's own part of a gather."""
    if not isinstance(verb, AllGather):
        return [(into, room)]
    start = rank * verb.buf.numel()
    stop = (rank + 1) * verb.buf.numel()
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


T = TypeVar("T")


class StreamEvent(NamedTuple):
    """The point on a stream of a device at which something is complete."""

    device: torch.device
    stream: Stream
    recorded: Event


class SideStream:
    """The one stream of a device on which messages of all models are computed.

    ``staging`` takes payloads from there to gloo and back. ``wire`` is the stream on
    which the device's own process groups are waited for, so that encodes go on
    meanwhile.
    """

    def __init__(
        self, device: torch.device, kind: Accelerator, staging: Staging
    ) -> None:
        self.device = device
        self.kind = kind
        self.staging = staging
        self.stream = side_stream(device)
        self.wire = kind.new_stream(device)

    @contextmanager
    def use(self) -> Iterator[None]:
        """A block that launches on this stream, without the caller's autocast."""
        with ExitStack() as undo:
            undo.enter_context(self.kind.use(self.stream))
            if torch.is_autocast_enabled(self.device.type):
                undo.enter_context(torch.autocast(self.device.type, enabled=False))
            yield

    def on(self, work: Callable[[], T]) -> Callable[[], T]:
        """The same work, launched on this stream."""

        def launch() -> T:
            with self.use():
                return work()

        return launch

    @contextmanager
    def behind(self, events: Iterable[StreamEvent]) -> Iterator[None]:
        """A block of copies on this stream, behind ``events``, without a wait."""
        for event in events:
            event.recorded.wait(self.stream)
        yield

    @contextmanager
    def wired(self, ready: StreamEvent) -> Iterator[None]:
        """A block of communication from the device's memory, behind ``ready``.

        At its end this thread waits until it is over, and what this stream launches is
        behind it.
        """
        ready.recorded.wait(self.wire)
        with self.kind.use(self.wire):
            yield
            over = self.kind.record(self.wire)
        over.synchronize()
        over.wait(self.stream)

    def record_event(self) -> StreamEvent:
        """Records an event behind what was launched on this stream so far."""
        return StreamEvent(self.device, self.stream, self.kind.record(self.stream))


class Streams:
    """Keeps the side stream of each device, which all threads share."""

    def __init__(self) -> None:
        self.sides: dict[torch.device, SideStream] = {}
        self.staging = Staging()

    def side(self, device: torch.device) -> SideStream | None:
        """The side stream of a device; None where it has no streams."""
        kind = kind_of(device)
        if kind is None:
            return None
        if device not in self.sides:
            self.sides[device] = SideStream(device, kind, self.staging)
        return self.sides[device]

    def record_event(self, device: torch.device) -> StreamEvent | None:
        """Records an event behind the work launched so far on this thread's stream.

        None where the device has no streams. Raises ``InvalidSetting`` where that work
        is only recorded, to run later.
        """
        kind = kind_of(device)
        if kind is None:
            return None
        if kind.is_capturing():
            raise InvalidSetting(
                "a CUDA graph is being captured, and gradients cannot be exchanged in "
                "it: a replayed graph does not communicate. Capture the forward pass "
                "alone, or capture in handle.no_sync() and call backward() outside of "
                "the graph"
            )
        stream = kind.current_stream(device)
        return StreamEvent(device, stream, kind.record(stream))

    def lead(self) -> None:
        """Has side streams wait for all launches of this thread's current streams."""
        for device, side in self.sides.items():
            if (event := self.record_event(device)) is not None:
                event.recorded.wait(side.stream)

    def catch_up(self) -> None:
        """Has this thread's current streams wait for all launches of side streams."""
        self.follow([side.record_event() for side in self.sides.values()])

    @contextmanager
    def beside(self) -> Iterator[None]:
        """A block whose kernels run on side streams, behind the work there."""
        with ExitStack() as undo:
            for side in self.sides.values():
                undo.enter_context(side.use())
            yield

    def follow(self, events: Iterable[StreamEvent]) -> None:
        """Has the streams that are current in this thread wait for ``events``.

        The host does not.
        """
        for event in events:
            kind = kind_of(event.device)
            assert kind is not None, "only a device with streams has events"
            event.recorded.wait(kind.current_stream(event.device))

    @contextmanager
    def behind(
        self,
        events: Iterable[StreamEvent],
        *,
        allocates: bool = False,
        to_host_bytes: int = 0,
        to_device_bytes: int = 0,
    ) -> Iterator[None]:
        """Runs a block of copies behind ``events``.

        The host waits at its end until they are done.

        It copies so many bytes in either direction, which are counted. A block that
        ``allocates`` memory which outlives it runs on the producers' streams: the
        memory is then theirs, and is not used for something else before they are done
        with it.
        """
        with ExitStack() as stack:
            used = {}
            for event in events:
                if event.device not in used:
                    side = self.side(event.device)
                    assert side is not None, "only a device with streams has events"
                    stream = event.stream if allocates else side.stream
                    used[event.device] = side.kind, stream
                    stack.enter_context(side.kind.use(stream))
                event.recorded.wait(used[event.device][1])
            yield
            for kind, stream in used.values():
                kind.record(stream).synchronize()
            self.staging.to_host_bytes += to_host_bytes
            self.staging.to_device_bytes += to_device_bytes


Copying = Callable[[], AbstractContextManager[None]]
"""A function that gives the context of copies between device and host."""


class StepEvents:
    """The events of one step, also if it is abandoned.

    There are none of gradients in host memory.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._ready: dict[str, StreamEvent] = {}
        self._closing: list[StreamEvent] = []
        self._over: dict[int, StreamEvent] = {}

    @property
    def has_any(self) -> bool:
        """Whether a gradient of the step lies on a device with streams."""
        return bool(self._ready)

    def ready(self, name: str, grad: Tensor) -> None:
        """Records an event behind the kernels that make a gradient."""
        if (event := self._streams.record_event(grad.device)) is not None:
            self._ready[name] = event

    def close(self) -> None:
        """Records events behind the whole backward pass."""
        self._closing += self._now()

    def _now(self) -> list[StreamEvent]:
        """An event on each device that has handed a gradient in."""
        devices = dict.fromkeys(event.device for event in self._ready.values())
        events = map(self._streams.record_event, devices)
        return [event for event in events if event is not None]

    def end(self, index: int, side: SideStream | None) -> None:
        """Records an event behind a message, on the side stream that computed it."""
        if side is not None:
            self._over[index] = side.record_event()

    def follow(self, indices: Iterable[int] | None = None) -> None:
        """Has the devices' current streams wait for messages; None stands for all."""
        chosen = self._over if indices is None else indices
        self._streams.follow(
            self._over[index] for index in chosen if index in self._over
        )

    def copying(
        self, names: Collection[str], side: SideStream | None, **counted: Any
    ) -> Copying:
        """Makes the block that copies gradients to where they are encoded and back.

        It is behind their own events and, where those are there already, behind the
        backward pass.
        """
        if not self._ready:
            return nullcontext
        ready = [self._ready[name] for name in names if name in self._ready]
        closing = self._closing
        if side is not None:
            return lambda: side.behind([*ready, *closing])
        return lambda: self._streams.behind([*ready, *closing], **counted)


@dataclass
class Offload:
    """The way of the tensor ``name`` of a message, in one step, to the host and back.

    Its pinned memory is written again in the next step. By then the host has waited for
    a place in the side stream that is behind all that was copied from there.
    """

    copies: Copies
    message: int
    name: str
    side: SideStream
    there: list[Tensor] = field(default_factory=list)
    out: StreamEvent | None = None

    @torch.no_grad()
    def leave(self) -> None:
        """Launches the copy to the host, and what the device computes before it."""
        side = self.side
        staging = side.staging
        key = self.message, self.name, "out"
        with side.use():
            copies = next(self.copies)
            self.there = staging.rooms(key, copies, side.kind)
            for room, tensor in zip(self.there, copies, strict=True):
                room.copy_(tensor, non_blocking=True)
                staging.to_host_bytes += room.nbytes
                staging.offloaded_bytes += room.nbytes
        self.out = side.record_event()

    @torch.no_grad()
    def encode(self) -> None:
        """Waits for the copy and encodes it.

        Launches the copy of that to the device.
        """
        side = self.side
        staging = side.staging
        assert self.out is not None, "what is encoded has left before"
        self.out.recorded.synchronize()
        made = self.copies.send(tuple(self.there))
        rooms = staging.rooms((self.message, self.name, "back"), made, side.kind)
        with side.use():
            back = tuple(
                torch.empty_like(tensor, device=side.device) for tensor in made
            )
            for room, result, tensor in zip(rooms, made, back, strict=True):
                room.copy_(result)
                tensor.copy_(room, non_blocking=True)
                staging.to_device_bytes += room.nbytes
            with suppress(StopIteration):
                self.copies.send(back)
                raise AssertionError("steps of two copies ask for a third")
