"""A process group's ranks find each other in a few turns with the store."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from gradwire.runtime.survive.groups import open_group
from gradwire.runtime.transport import wire

LIMIT = timedelta(seconds=60)


class Relay:
    """A way to a store, which counts how often its users wait for an answer."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._sockets = [self._listening]
        self.turns: list[int] = []
        """The questions of each connection, each after an answer."""
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, *work: Any) -> None:
        thread = threading.Thread(target=partial(*work))
        thread.start()
        self._threads.append(thread)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._sockets += near, far
                place = len(self.turns)
                self.turns.append(0)
                is_asked = threading.Event()
                self._start(self._carry_questions, near, far, place, is_asked)
                self._start(self._carry_answers, far, near, is_asked)

    def _carry_questions(
        self,
        near: socket.socket,
        far: socket.socket,
        place: int,
        is_asked: threading.Event,
    ) -> None:
        with suppress(OSError):
            while data := near.recv(1 << 16):
                if not is_asked.is_set():
                    is_asked.set()
                    self.turns[place] += 1
                far.sendall(data)

    def _carry_answers(
        self, far: socket.socket, near: socket.socket, is_asked: threading.Event
    ) -> None:
        with suppress(OSError):
            while data := far.recv(1 << 16):
                is_asked.clear()
                near.sendall(data)

    def close(self) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize("opens", ["channels", "a group"])
def test_more_ranks_ask_the_store_no_more_often(
    opens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between far hosts each question takes a round trip."""

    def most_turns(world: int) -> int:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True)
        relay = Relay(server.port)
        near = dist.TCPStore("127.0.0.1", relay.port, is_master=False)
        monkeypatch.setattr(wire, "_given", [near])
        before = len(relay.turns)

        def connect(rank: int) -> object:
            if opens == "channels":
                return wire.open_channels("some", rank, world, 1, LIMIT)
            return open_group("some", rank, world, LIMIT)

        with ThreadPoolExecutor(world) as pool:
            kept = [*pool.map(connect, range(world))]
        turns = max(relay.turns[before:])
        del kept
        relay.close()
        return turns

    # an answer may come in parts
    assert most_turns(6) <= most_turns(2) + 2
