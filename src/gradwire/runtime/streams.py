"""Streams: copies of a device's gradients are made behind the kernels that produce them.

Autograd launches a gradient's kernels on the stream that is current in its thread, and goes on
before they have run. A message is gathered in a thread of its own, whose current stream is another,
so its copy could read a gradient that is not computed yet. Therefore a mark is left on the
producer's stream where a gradient is handed in. The copies, on a stream of their own, wait for the
marks: for these kernels, and for none that were launched since. At the end of a block of copies the
host waits for them, so that later work on any stream finds them done.

Gradients in host memory get no mark, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

Stream = Any
"""A stream of a device, with ``synchronize()``."""
Event = Any
"""A place in a stream, with ``wait(stream)``."""


class Mark(NamedTuple):
    """The point on its producer's stream at which a gradient is complete."""

    device: torch.device
    stream: Stream
    event: Event


class Device(Protocol):
    """The functions that a kind of device must have; `Cuda` is one."""

    def current_stream(self, device: torch.device) -> Stream: ...

    def new_stream(self, device: torch.device) -> Stream: ...

    def record(self, stream: Stream) -> Event: ...

    def use(self, stream: Stream) -> AbstractContextManager[Any]: ...


class Cuda:
    """CUDA's streams, and ROCm's, which torch gives the same names."""

    def current_stream(self, device: torch.device) -> Stream:
        return torch.cuda.current_stream(device)

    def new_stream(self, device: torch.device) -> Stream:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, stream: Stream) -> Event:
        return stream.record_event()

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)


class Streams:
    """Keeps a stream for copies on each device, which all threads that copy share."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._own: dict[torch.device, Stream] = {}

    def mark(self, device: torch.device) -> Mark:
        """A mark behind the work launched so far on the stream that is current in this thread."""
        stream = self._device.current_stream(device)
        return Mark(device, stream, self._device.record(stream))

    @contextmanager
    def behind(self, marks: Iterable[Mark], *, allocates: bool = False) -> Iterator[None]:
        """Runs a block of copies behind ``marks``; ends when they are done.

        A block that ``allocates`` memory which outlives it runs on the producers' streams: the
        memory is then theirs, and is not used for something else before they are done with it.
        """
        with ExitStack() as stack:
            used: dict[torch.device, Stream] = {}
            for mark in marks:
                if mark.device not in used:
                    used[mark.device] = mark.stream if allocates else self._stream(mark.device)
                    stack.enter_context(self._device.use(used[mark.device]))
                mark.event.wait(used[mark.device])
            yield
            for stream in used.values():
                stream.synchronize()

    def _stream(self, device: torch.device) -> Stream:
        if device not in self._own:
            self._own[device] = self._device.new_stream(device)
        return self._own[device]


Copying = Callable[[], AbstractContextManager[None]]
"""A function that gives the context in which copies between device and host are made."""
