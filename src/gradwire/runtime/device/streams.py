"""Streams: where the compute lane's work is done for gradients that a device computes.

Autograd launches a gradient's kernels on the stream that is current in its thread, and goes on
before they have run. So a mark is left on that stream where a gradient is handed in. A message is
gathered, encoded, decoded and scattered on the one ``SideStream`` of its device, behind the marks
of its gradients: behind these kernels, and behind none that were launched since. What it does ends
with a mark too, and whoever uses a mean has his own stream wait for that. The host waits for
neither.

A message that is encoded on the host, of gradients that a device computes, copies them ``behind``
their marks and waits for the copies.

Memory is used again without a wait where its own stream is behind all who used it. Gradients are
their producers', who wait for the end of the message before they go on. What the side stream makes
for itself only it uses.

Gradients in host memory get no mark, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple, TypeVar

import torch

from ...errors import InvalidSetting
from .devices import Device, Event, Stream, kind_of, side_stream
from .staging import Staging

T = TypeVar("T")


class Mark(NamedTuple):
    """The point on a stream of a device at which something is complete."""

    device: torch.device
    stream: Stream
    event: Event


class SideStream:
    """The one stream of a device on which messages are computed, of this model and of others.

    ``staging`` takes payloads from there to gloo and back. ``wire`` is the stream on which the
    device's own process groups are waited for, so that encodes go on meanwhile.
    """

    def __init__(self, device: torch.device, kind: Device, staging: Staging) -> None:
        self.device, self.kind, self.staging = device, kind, staging
        self.stream, self.wire = side_stream(device), kind.new_stream(device)

    @contextmanager
    def use(self) -> Iterator[None]:
        """A block whose kernels are launched on this stream, without the caller's autocast."""
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
    def behind(self, marks: Iterable[Mark]) -> Iterator[None]:
        """A block of copies on this stream, behind ``marks``; the host does not wait."""
        for mark in marks:
            mark.event.wait(self.stream)
        yield

    @contextmanager
    def wired(self, ready: Mark) -> Iterator[None]:
        """A block of communication from the device's memory, behind ``ready``.

        At its end this thread waits until it is over, and what this stream launches is behind it.
        """
        ready.event.wait(self.wire)
        with self.kind.use(self.wire):
            yield
            over = self.kind.record(self.wire)
        over.synchronize()
        over.wait(self.stream)

    def mark(self) -> Mark:
        """A mark behind what was launched on this stream so far."""
        return Mark(self.device, self.stream, self.kind.record(self.stream))


class Streams:
    """Keeps the side stream of each device, which all threads share."""

    def __init__(self) -> None:
        self._sides: dict[torch.device, SideStream] = {}
        self.staging = Staging()

    def side(self, device: torch.device) -> SideStream | None:
        """The side stream of a device; None where it has no streams."""
        kind = kind_of(device)
        if kind is None:
            return None
        if device not in self._sides:
            self._sides[device] = SideStream(device, kind, self.staging)
        return self._sides[device]

    def mark(self, device: torch.device) -> Mark | None:
        """A mark behind the work launched so far on the stream that is current in this thread.

        None where the device has no streams. Raises ``InvalidSetting`` where that work is only
        recorded, to run later.
        """
        kind = kind_of(device)
        if kind is None:
            return None
        if kind.is_capturing():
            raise InvalidSetting(
                "a CUDA graph is being captured, and gradients cannot be exchanged in it: what a "
                "graph repeats knows nothing of other ranks. Capture the forward pass alone, or "
                "capture in handle.no_sync() and call backward() outside of the graph"
            )
        stream = kind.current_stream(device)
        return Mark(device, stream, kind.record(stream))

    def lead(self) -> None:
        """Has side streams wait for all that the streams current in this thread have launched."""
        for device, side in self._sides.items():
            if (mark := self.mark(device)) is not None:
                mark.event.wait(side.stream)

    def catch_up(self) -> None:
        """Has the streams current in this thread wait for all that side streams have launched."""
        self.follow([side.mark() for side in self._sides.values()])

    @contextmanager
    def beside(self) -> Iterator[None]:
        """A block whose kernels are launched on the side streams, behind what is there."""
        with ExitStack() as undo:
            for side in self._sides.values():
                undo.enter_context(side.use())
            yield

    def follow(self, marks: Iterable[Mark]) -> None:
        """Has the streams that are current in this thread wait for ``marks``; the host does not."""
        for mark in marks:
            kind = kind_of(mark.device)
            assert kind is not None, "only a device with streams gives marks"
            mark.event.wait(kind.current_stream(mark.device))

    @contextmanager
    def behind(
        self,
        marks: Iterable[Mark],
        *,
        allocates: bool = False,
        to_host_bytes: int = 0,
        to_device_bytes: int = 0,
    ) -> Iterator[None]:
        """Runs a block of copies behind ``marks``; the host waits at its end until they are done.

        It copies so many bytes in either direction, which are counted. A block that ``allocates``
        memory which outlives it runs on the producers' streams: the memory is then theirs, and is
        not used for something else before they are done with it.
        """
        with ExitStack() as stack:
            used: dict[torch.device, tuple[Device, Stream]] = {}
            for mark in marks:
                if mark.device not in used:
                    side = self.side(mark.device)
                    assert side is not None, "only a device with streams gives marks"
                    stream = mark.stream if allocates else side.stream
                    used[mark.device] = side.kind, stream
                    stack.enter_context(side.kind.use(stream))
                mark.event.wait(used[mark.device][1])
            yield
            for kind, stream in used.values():
                kind.record(stream).synchronize()
            self.staging.to_host_bytes += to_host_bytes
            self.staging.to_device_bytes += to_device_bytes


Copying = Callable[[], AbstractContextManager[None]]
"""A function that gives the context in which copies between device and host are made."""
