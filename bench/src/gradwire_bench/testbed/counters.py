"""Bytes on the wire, as the interface itself counted them.

Figures come from ``/proc/net/dev``, never from a program's own arithmetic, so they
include headers, acknowledgements and retransmissions. One caveat: the kernel hands a
virtual link up to 64 KiB in one piece and counts that piece's headers once, so the
counters show up to 4.4 % less than the frames of a physical wire would (66 header bytes
a frame of 1514).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from ..errors import TestbedUnavailable

LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"


@dataclass(frozen=True, kw_only=True)
class InterfaceCounters:
    """Bytes an interface has sent and received since it exists.

    ``interface`` says which one was read. ``shared`` is true for the loopback
    interface, through which everything on the machine goes: its figures belong to all
    hosts together.
    """

    interface: str
    tx_bytes: int
    rx_bytes: int
    shared: bool = False

    def since(self, earlier: InterfaceCounters) -> InterfaceCounters:
        """The bytes counted after ``earlier``, which must be of the same interface."""
        assert self.interface == earlier.interface, "counters of different interfaces"
        return InterfaceCounters(
            interface=self.interface,
            tx_bytes=self.tx_bytes - earlier.tx_bytes,
            rx_bytes=self.rx_bytes - earlier.rx_bytes,
            shared=self.shared,
        )


def parse_counters(text: str, interface: str) -> InterfaceCounters | None:
    """Finds one interface in the text of ``/proc/net/dev``; None where it is not
    listed.
    """
    for line in text.splitlines():
        name, colon, figures = line.partition(":")
        if colon and name.strip() == interface:
            columns = [int(figure) for figure in figures.split()]
            return InterfaceCounters(
                interface=interface,
                rx_bytes=columns[0],
                tx_bytes=columns[8],
                shared=interface == LOOPBACK,
            )
    return None


def read_counters(device_file: Path, *interfaces: str) -> InterfaceCounters:
    """Counters of the first of ``interfaces`` that ``device_file`` lists.

    Raises TestbedUnavailable where none is there or the kernel has no such file.
    """
    try:
        text = device_file.read_text(encoding="utf-8")
    except OSError as problem:
        raise TestbedUnavailable(
            f"interface counters cannot be read from {device_file}: "
            f"{problem.strerror}; they need Linux"
        ) from None
    for interface in interfaces:
        counters = parse_counters(text, interface)
        if counters is not None:
            return counters
    raise TestbedUnavailable(f"{device_file} lists none of: {', '.join(interfaces)}")


def own_counters() -> InterfaceCounters:
    """Counters of the interface that this rank communicates through.

    ``GLOO_SOCKET_IFNAME``, which `launch` sets, names the interface. It is the loopback
    one where the variable is unset or names one that is not here; ``.interface`` tells
    which. Raises TestbedUnavailable outside Linux.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    wanted = (named, LOOPBACK) if named else (LOOPBACK,)
    return read_counters(Path("/proc/net/dev"), *wanted)
