"""The forwarder of far hosts, as its owner sees it.

A process of its own (`_forward.py`, `forwarder.cpp`) reads what hosts send, keeps each
packet for the delay, and lets it in at the receiver's rate.
"""

import ctypes
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gradwire.contract.units import format_seconds

from ..errors import TestbedUnavailable
from ._orphans import open_helper
from .wide_area import WideArea

_FOLDER = Path(__file__).parent
_BUSY = 0.9
_LATE = 0.05


@dataclass(frozen=True, kw_only=True)
class ForwarderCounters:
    """The forwarder's work since it began.

    ``num_late`` frames left later than they were due by more than 0.5 ms and 5 % of the
    delay. ``busiest`` is the largest share of a second that was its processor time.
    """

    num_frames: int
    num_dropped: int
    num_late: int
    processor_s: float
    seconds: float
    busiest: float

    @property
    def fault(self) -> str:
        """Why the links may not have set the pace; empty where they did."""
        if self.busiest > _BUSY:
            return "; the forwarder was the limit at times, and not the links"
        if self.num_late > _LATE * self.num_frames:
            return "; the machine had no time for it, so delays were longer than asked"
        return ""

    def __str__(self) -> str:
        late = self.num_late / max(1, self.num_frames)
        busy = self.processor_s / max(self.seconds, 1e-9)
        return (
            f"forwarder: {format_seconds(self.processor_s)} of processor time, busy "
            f"{busy:.0%} of {format_seconds(self.seconds)} and {self.busiest:.0%} of "
            f"its busiest second; {self.num_frames} pieces, {self.num_dropped} "
            f"dropped, {late:.1%} late{self.fault}"
        )


class Rate(Protocol):
    """Figures of one direction of a link."""

    @property
    def rate_bytes_per_s(self) -> float: ...

    @property
    def burst_bytes(self) -> int: ...

    @property
    def limit_bytes(self) -> int: ...


class Forwarder:
    """A running forwarder. Devices of hosts are in the holder's namespace at first."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._turn = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def shape(self, host: int, up: Rate, down: Rate) -> None:
        """Limits what a host receives, and says at which rate the kernel sends."""
        for verb, rate in (("out", up), ("in", down)):
            burst_ns = round(1e9 * rate.burst_bytes / rate.rate_bytes_per_s)
            rate_bytes_per_s = round(rate.rate_bytes_per_s)
            self._ask(f"{verb} {host} {rate_bytes_per_s} {burst_ns} {rate.limit_bytes}")

    def set_link(self, host: int, *, up: bool) -> None:
        """Loses all that a host sends and receives, or no longer."""
        self._ask(f"link {host} {int(up)}")

    def counters(self) -> ForwarderCounters:
        """Its work so far."""
        figures = [int(figure) for figure in self._ask("count").split()]
        frames, dropped, late, processor_ns, wall_ns, busiest = figures
        return ForwarderCounters(
            num_frames=frames,
            num_dropped=dropped,
            num_late=late,
            processor_s=processor_ns / 1e9,
            seconds=wall_ns / 1e9,
            busiest=busiest / 1e3,
        )

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._turn:
            try:
                self._process.stdin.write(f"{line}\n")
                self._process.stdin.flush()
                answer = self._process.stdout.readline()
            except OSError:
                answer = ""
        if not answer:
            raise TestbedUnavailable("the forwarder of the testbed has ended")
        return answer


def compiled_forwarder() -> Path:
    """The file of the compiled forwarder, which is made where there is none.

    Raises TestbedUnavailable where it cannot be compiled or kept.
    """
    # loads torch, which a testbed without distance does not need
    from gradwire.kernels.libraries import load_library

    library = load_library("forwarder", _FOLDER)
    if library is None:
        raise TestbedUnavailable("links with delay need a C++ compiler; install g++")
    name = ctypes.create_string_buffer(os.pathconf("/", "PC_PATH_MAX"))
    library.name_library(name, len(name))
    path = Path(os.fsdecode(name.value))
    if not path.exists():
        raise TestbedUnavailable(
            "the compiled forwarder cannot be kept; set XDG_CACHE_HOME to a folder"
        )
    return path


@contextmanager
def open_forwarder(
    enter: Sequence[str], num_hosts: int, wide_area: WideArea
) -> Iterator[Forwarder]:
    """A forwarder for the length of a ``with`` block.

    Args:
        enter: Words before a command that runs in the holder's namespace.
        num_hosts: How many devices it makes: port0, port1 and so on.
        wide_area: Has the delay and the jitter.

    Raises:
        TestbedUnavailable: The machine has no TAP devices or no compiler.
    """
    words = [
        str(compiled_forwarder()),
        str(num_hosts),
        str(round(1e9 * wide_area.delay_s)),
        str(round(1e9 * wide_area.jitter_s)),
    ]
    with open_helper(enter, "_forward.py", *words) as process:
        assert process.stdout is not None
        word, _, why = process.stdout.readline().strip().partition(" ")
        if word != "ready":
            raise TestbedUnavailable(
                f"links with delay need TAP devices ({why or 'the forwarder ended'})"
            )
        yield Forwarder(process)
