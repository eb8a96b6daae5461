"""Links with limited rates in user space, for a machine without network namespaces.

A relay, a process of its own, stands between the ranks. A rank finds the relay's
address in torch's store in place of another rank's, so all of gloo's bytes pass through
the relay. There each rank has one link: a token bucket for the bytes that it sends, and
one for the bytes that it receives.

Two ranks that gloo connects decide by their addresses which one listens. So the relay
takes a port above the reader's own where the other rank's port is above, and one below
otherwise (`ports_beyond`).

Rates are of TCP's payload, without headers. The relay counts the bytes of each rank.
Where ranks are far it keeps bytes back for the delay; connections are made without it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from ..errors import TestbedUnavailable
from . import counters
from .counters import InterfaceCounters
from .wide_area import NEAR, WideArea

RELAY = "GRADWIRE_BENCH_RELAY"
"""The environment variable of ranks behind a relay: its port for questions."""
_HOME = "127.0.0.1"
_PIECE = 1 << 16
_WAITING = 1 << 20
_MOST_PIECES = 4096
"""Pieces of one connection that are on their way at a time."""
_AT_ONCE_S = 1e-4
_ADDRESS_BYTES = 136
"""Bytes of an address in gloo's record of a rank: a ``sockaddr_storage`` and a
number.
"""


# ---- The relay's own process ---------------------------------------------------------


class Links:
    """Each rank's two token buckets; after a pause the bytes of ``burst_s`` pass at
    once.
    """

    def __init__(
        self, rate_bytes_per_s: float, burst_s: float, wide_area: WideArea = NEAR
    ) -> None:
        self._rate = rate_bytes_per_s
        self._burst_s = burst_s
        self._wide_area = wide_area
        self._draws = random.Random(0)
        self._up_s: dict[int, float] = {}
        self._down_s: dict[int, float] = {}
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()

    def due_s(self, source: int, target: int, size_bytes: int, ready_s: float) -> float:
        """When the last of some bytes has passed both links that are ready at a time,
        without the delay.
        """
        up_span_s = size_bytes / self._wide_area.up(source, self._rate)
        down_span_s = size_bytes / self._wide_area.down(target, self._rate)
        idle_s = ready_s - self._burst_s
        up_s = max(self._up_s.get(source, idle_s), idle_s)
        down_s = max(self._down_s.get(target, idle_s), up_s)
        self._up_s[source] = up_s + up_span_s
        # the last bytes cannot come in before they went out
        self._down_s[target] = max(down_s + down_span_s, up_s + up_span_s)
        self.sent[source] += size_bytes
        self.received[target] += size_bytes
        return self._down_s[target]

    def delay_s(self) -> float:
        """How long the next bytes are kept back."""
        return self._wide_area.delay_s + self._draws.uniform(
            0, self._wide_area.jitter_s
        )


def ports_beyond(own_port: int, *, above: bool) -> Iterator[int]:
    """Ports above ``own_port``, or below it, in whatever order a machine reads their
    two bytes.

    gloo compares the bytes of ports as they are sent, high byte first, and most
    machines read the low byte first. Of 0x90ff and 0x9100 such a machine finds 0x90ff
    the higher one. So no byte of a port above is lower than that of ``own_port``.

    >>> hex(next(ports_beyond(0x90FF, above=True)))
    '0x91ff'
    >>> hex(next(ports_beyond(0x9100, above=False)))
    '0x9000'
    """
    own_high, own_low = divmod(own_port, 256)
    for high in range(own_high, 256) if above else range(own_high, 3, -1):
        for low in range(own_low, 256) if above else range(own_low, -1, -1):
            if (port := 256 * high + low) != own_port:
                yield port


class Relay:
    """Answers ranks' questions, and carries bytes between the ranks that ask for a
    way.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._rank_at: dict[int, int] = {}

    async def answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answers one rank's questions until it leaves."""
        while line := await reader.readline():
            verb, *words = json.loads(line)
            found = await getattr(self, f"_{verb}")(*words)
            writer.write(json.dumps(found).encode() + b"\n")
        writer.close()

    async def _listens(self, rank: int, port: int) -> None:
        self._rank_at[port] = rank

    async def _count(self, rank: int) -> list[int]:
        return [self._links.sent[rank], self._links.received[rank]]

    async def _way(self, source: int, own_port: int, port: int) -> int:
        """The port by which a rank that listens at ``own_port`` reaches the one at
        ``port``.
        """
        target = self._rank_at[port]

        async def serve(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            there, back = await asyncio.open_connection(_HOME, port, limit=_WAITING)
            await asyncio.gather(
                self._carry(reader, back, source, target),
                self._carry(there, writer, target, source),
            )

        for free in ports_beyond(own_port, above=port > own_port):
            with suppress(OSError):
                await asyncio.start_server(serve, _HOME, free, limit=_WAITING)
                return free
        raise AssertionError("no port is free")

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        source: int,
        target: int,
    ) -> None:
        clock = asyncio.get_running_loop().time
        way = asyncio.Queue[tuple[float, bytes]](_MOST_PIECES)
        delivering = asyncio.create_task(self._deliver(way, writer))
        with suppress(ConnectionError):
            asked_s = clock()
            due_s = asked_s
            while piece := await reader.read(_PIECE):
                # Bytes that need no wait were here when the last ones were due, however
                # late the relay has been since.
                has_waited = clock() - asked_s > _AT_ONCE_S
                came_s = clock() if has_waited else asked_s
                ready_s = came_s if has_waited else min(due_s, asked_s)
                due_s = self._links.due_s(source, target, len(piece), ready_s)
                if (wait_s := due_s - clock()) > 0:
                    await asyncio.sleep(wait_s)
                arrives_s = max(due_s, came_s) + self._links.delay_s()
                await way.put((arrives_s, piece))
                asked_s = clock()
        await way.put((0.0, b""))
        await delivering

    async def _deliver(
        self, way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        """Hands over pieces in their order, each no sooner than it is due."""
        clock = asyncio.get_running_loop().time
        is_open = True
        while (due := await way.get())[1]:
            due_s, piece = due
            if (wait_s := due_s - clock()) > 0:
                await asyncio.sleep(wait_s)
            try:
                if is_open:
                    writer.write(piece)
                    await writer.drain()
            except ConnectionError:
                # what is still on its way is lost
                is_open = False
        writer.close()


async def _serve(settings: dict[str, Any]) -> None:
    relay = Relay(Links(**settings))
    server = await asyncio.start_server(relay.answer, _HOME, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # the end of whoever started it


@contextmanager
def open_relay(
    rate_bytes_per_s: float, burst_s: float, wide_area: WideArea = NEAR
) -> Iterator[int]:
    """A relay for the length of a ``with`` block: its port for questions."""
    settings = {
        "rate_bytes_per_s": rate_bytes_per_s,
        "burst_s": burst_s,
        "wide_area": asdict(wide_area),
    }
    command = [sys.executable, "-P", "-m", __name__, json.dumps(settings)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


# ---- A rank --------------------------------------------------------------------------


class Client:
    """A rank's questions to the relay."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        relay = socket.create_connection((_HOME, int(os.environ[RELAY])))
        self._lines = relay.makefile("rw", encoding="utf-8")
        relay.close()  # once the file is closed, too
        self._turn = threading.Lock()

    def ask(self, verb: str, *words: int) -> Any:
        """The relay's answer to a question of this rank's."""
        with self._turn:
            self._lines.write(json.dumps([verb, *words]) + "\n")
            self._lines.flush()
            return json.loads(self._lines.readline())

    def counters(self) -> InterfaceCounters:
        """The bytes that this rank has sent and received through the relay."""
        sent, received = self.ask("count", self.rank)
        return InterfaceCounters(interface="relay", tx_bytes=sent, rx_bytes=received)


def own_counters() -> InterfaceCounters:
    """Counters of this rank's link: the relay's where there is one, else its
    interface's.
    """
    if RELAY in os.environ:
        return Client(int(os.environ["RANK"])).counters()
    return counters.own_counters()


class RelayedStore(Store):
    """A store in which this rank finds ways through the relay in place of other ranks'
    addresses.

    torch calls the methods of a store that is written in Python by these names.
    """

    _all: ClassVar[list[RelayedStore]] = []
    """Every store that was made, as torch keeps no Python object alive."""

    def __init__(self, store: Any, client: Client, own_ports: dict[str, int]) -> None:
        super().__init__()
        self._store = store
        self._client = client
        self._own_ports = own_ports
        self._all.append(self)

    def set(self, key: str, value: Any) -> None:
        if (port := _port_in(value)) is not None:
            self._own_ports[key.rpartition("/")[0]] = port
            self._client.ask("listens", self._client.rank, port)
        self._store.set(key, bytes(value))

    def get(self, key: str) -> bytes:
        value = bytes(self._store.get(key))
        port = _port_in(value)
        own = self._own_ports.get(key.rpartition("/")[0])
        if port is None or own is None or port == own:
            return value
        way = self._client.ask("way", self._client.rank, own, port)
        place = value.index(port.to_bytes(2, "big") + socket.inet_aton(_HOME))
        return bytes(value[:place] + way.to_bytes(2, "big") + value[place + 2 :])

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._store.wait(keys, *timeout)

    def compare_set(self, key: str, expected: Any, wanted: Any) -> bytes:
        found: bytes = self._store.compare_set(key, expected, wanted)
        return found

    def deleteKey(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def getNumKeys(self) -> int:
        return int(self._store.num_keys())

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> RelayedStore:
        return RelayedStore(self._store.clone(), self._client, self._own_ports)


def _port_in(value: bytes) -> int | None:
    """The port in gloo's record of a rank: a name with its length, and an address with
    its own.
    """
    start = 8 + int.from_bytes(value[:8], "little")
    head = _ADDRESS_BYTES.to_bytes(8, "little") + socket.AF_INET.to_bytes(2, "little")
    if value[start : start + 10] != head:
        return None
    return int.from_bytes(value[start + 10 : start + 12], "big")


@contextmanager
def relayed_group(timeout: timedelta | None = None) -> Iterator[None]:
    """Joins the group that torchrun's variables describe, through the relay.

    ``timeout`` limits each wait of the group; torch's own, half an hour, if left out.
    """
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    client = Client(rank)
    port = int(os.environ["MASTER_PORT"])
    shared = TCPStore(os.environ["MASTER_ADDR"], port, world, rank == 0)
    store = RelayedStore(shared, client, {})
    dist.init_process_group(
        "gloo", timeout=timeout, store=store, rank=rank, world_size=world
    )
    try:
        dist.barrier()
        if not client.counters().tx_bytes:
            raise TestbedUnavailable(
                f"gloo of torch {torch.__version__} passes by the relay"
            )
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    asyncio.run(_serve({**given, "wide_area": WideArea(**given["wide_area"])}))
