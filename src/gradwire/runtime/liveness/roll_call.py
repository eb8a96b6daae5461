"""Roll call: ranks find out, without the store, which ranks can be reached.

If a store does not answer, it may be lost, or the network between it and this rank.
Signs of life in the store cannot tell a dead rank from a rank behind a broken link. So
every rank listens at a probe port while it is attached. The port's address stands in
the store. A rank probes all others when a step fails. A refused connection means that
the process has ended. A connection without an answer means that the process is stopped.
No connection at all means that the host, or the link to it, is down.

If the store does not take an alarm, probes carry it. So all ranks on one side of a
parted network hear the first alarm.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable
from enum import Enum
from functools import partial
from secrets import token_hex
from typing import Any, NamedTuple

from ..transport.wire import in_background

ASK_S = 2.0
"""Seconds in which another rank has to answer.

A link that loses packets needs a second try.
"""
_SERVE_S = ASK_S
"""Seconds that a visitor has in all to say who it is, and to take the answer.

A rank whose processor is busy reads late.
"""
_MOST_VISITORS = 64
"""Visitors that are served at once.

Further visitors wait, as no visitor stays long.
"""
_MOST_BYTES = 1 << 14
"""More than any alarm has; see `alarm.MOST_CHARACTERS`."""


class Reach(Enum):
    """The answer of another rank to a probe."""

    ANSWERS = "answers"
    MUTE = "its process is stopped, or too busy to answer"
    ENDED = "its process has ended"
    DETACHED = "it has detached, and this rank trains on"
    CUT = "cannot be reached"
    UNKNOWN = "has no probe port"


class RollCall:
    """This rank's probe port, and the ports of the others once ``meet`` has found them.

    ``heard`` is called with the encoded alarm that another rank's probe carries.
    ``alarm`` returns this rank's own alarm, or "" without one; every answer holds it.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        heard: Callable[[bytes], None],
        alarm: Callable[[], str],
    ) -> None:
        self.rank = rank
        self.world = world
        self._heard = heard
        self._alarm = alarm
        self._token = token_hex(8)
        self._listening: socket.socket | None = None
        self._probes: dict[int, tuple[str, int, str]] = {}
        self._way: _Way | None = None
        self.is_complete = False
        self.ended: set[int] = set()
        """The ranks whose process has ended, as their probe ports said last."""
        self._places = threading.BoundedSemaphore(_MOST_VISITORS)

    def meet(self, store: Any) -> None:
        """Opens the probe port, shows its address in the store, and finds others'.

        To be called until ``is_complete``; never waits for anybody.
        """
        probes = [f"door/{rank}" for rank in range(self.world)]
        ways = [f"way/{rank}" for rank in range(self.world)]
        if self._way is None:
            self._way = _way_to(_host_of(store))
            store.set(ways[self.rank], self._way.shown)
        if self._listening is None and store.check(ways):
            shown = {line.decode() for line in store.multi_get(ways)} - {""}
            store.set(probes[self.rank], json.dumps(self._open(self._way, shown)))
        if store.check(probes):
            self.is_complete = True
            for rank, line in enumerate(store.multi_get(probes)):
                host, port, token = json.loads(line)
                if port and rank != self.rank:
                    # A rank whose way to the store stays on its host is where the store
                    # is.
                    self._probes[rank] = (host or _host_of(store), port, token)

    def ask(self) -> tuple[dict[int, Reach], bytes]:
        """The answer of each other rank, and the first alarm known to one, if any."""
        reach = {rank: Reach.UNKNOWN for rank in range(self.world) if rank != self.rank}
        first = b""
        for rank, (how, alarm) in asyncio.run(self._knock_everywhere("")).items():
            reach[rank] = how
            first = first or alarm
        return reach, first

    def announce(self, alarm: str) -> None:
        """Announces an alarm to all ranks that a probe can reach."""
        asyncio.run(self._knock_everywhere(alarm))

    def close(self) -> None:
        """Closes the probe port."""
        if self._listening is not None:
            with contextlib.suppress(OSError):
                # wakes the thread that accepts up
                self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()

    def _open(self, way: _Way, shown: set[str]) -> tuple[str, int, str]:
        """The address of this rank's probe port and its token.

        Port 0 where there can be none.

        The port is at the address that leads to the store, and at no other of this
        host. A rank on the store's host takes the address at which others see the store
        (``shown``). Where they see it at several, the port is at all of the host's
        addresses.
        """
        address = way.own
        family = way.family
        if not address:
            return "", 0, ""
        if way.is_near and shown:
            address = next(iter(shown)) if len(shown) == 1 else ""
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listening = socket.socket(family, socket.SOCK_STREAM)
            try:
                listening.bind((address, 0))
            except OSError:  # others see an address that no interface here has
                listening.bind(("", 0))
            listening.listen(max(self.world, _MOST_VISITORS))
            port = listening.getsockname()[1]
        except (OSError, ValueError):  # no network that can be listened on
            return "", 0, ""
        self._listening = listening
        threading.Thread(
            target=self._serve, name="gradwire roll call", daemon=True
        ).start()
        return address, port, self._token

    def _serve(self) -> None:
        assert self._listening is not None
        while True:
            try:
                visitor, _ = self._listening.accept()
            except OSError:  # the port was closed
                return
            self._places.acquire()
            in_background(partial(self._answer, visitor))

    def _answer(self, visitor: socket.socket) -> None:
        """Serves one visitor, who has ``_SERVE_S`` in all."""
        end_s = time.monotonic() + _SERVE_S
        said = b""
        known = f"{self._token}\n".encode()
        try:
            with visitor, contextlib.suppress(OSError, ValueError):
                while said.count(b"\n") < 2 and len(said) < _MOST_BYTES:
                    visitor.settimeout(max(1e-3, end_s - time.monotonic()))
                    part = visitor.recv(_MOST_BYTES)
                    said += part
                    is_known = said.startswith(known) or known.startswith(said)
                    if not part or not is_known:  # as far as it has come
                        return
                visitor.sendall(f"here {self._alarm()}\n".encode())
        finally:
            self._places.release()
        if said.count(b"\n") >= 2 and (line := said.splitlines()[1].strip()):
            self._heard(line)

    async def _knock_everywhere(self, alarm: str) -> dict[int, tuple[Reach, bytes]]:
        answers = await asyncio.gather(
            *(_knock(*probe, alarm) for probe in self._probes.values())
        )
        found = dict(zip(self._probes, answers, strict=True))
        self.ended = {rank for rank, (how, _) in found.items() if how is Reach.ENDED}
        return found


async def _knock(host: str, port: int, token: str, alarm: str) -> tuple[Reach, bytes]:
    """The answer of one rank, and the alarm that it knows of."""
    writer = None
    try:
        async with asyncio.timeout(ASK_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(f"{token}\n{alarm}\n".encode())
            await writer.drain()
            line = await reader.readline()
        word, _, announced = line.strip().partition(b" ")
        return (Reach.ANSWERS, announced) if word == b"here" else (Reach.ENDED, b"")
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        return Reach.ENDED, b""
    except (OSError, ValueError):  # also a time-out
        return (Reach.CUT if writer is None else Reach.MUTE), b""
    finally:
        if writer is not None:
            writer.close()


class _Way(NamedTuple):
    """This rank's way to the store: its own address on it, and the store's, as it is
    ``shown`` to ranks on the store's host; empty where this rank is on that host, or
    has no such way.
    """

    family: int = socket.AF_INET
    own: str = ""
    shown: str = ""
    is_near: bool = False


def _way_to(store_host: str) -> _Way:
    if not store_host:  # no TCP to the store
        return _Way()
    try:
        family, *_, address = socket.getaddrinfo(store_host, 1, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing, and shows which own address is used
            own = str(probe.getsockname()[0])
        is_near = ipaddress.ip_address(own.partition("%")[0]).is_loopback
    except (OSError, ValueError):
        return _Way()
    return _Way(family, own, "" if is_near else str(address[0]), is_near)


def _host_of(store: Any) -> str:
    """The host of a job's TCP store; empty where it is of another kind."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))
