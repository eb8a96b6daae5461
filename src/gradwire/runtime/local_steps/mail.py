"""Mail: messages of partial rounds between ranks, beside the training step.

Each rank has two threads for each other rank: one sends and one receives. A message is
a head of fixed size and the bytes of a payload. Messages of one rank to another arrive
in order. A receive waits for as long as its sender lives, since no rank knows when a
message will come. A payload travels in pieces: the time-out bounds each of them, and
not the time of a long payload.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from ...exchange.rounds import Contribution, Merge, Opening, Pull, Push, Snapshot
from ..transport.direct import PIECE_BYTES
from ..transport.wire import Channel

_HEAD_TAG = 1
_PAYLOAD_TAG = 2
_CLOSING_S = 10.0
"""Seconds that ``close`` waits for messages under way, and for the other ranks."""


class Note(NamedTuple):
    """A rank's announcement that it has come to a joint call."""

    call: str
    local_step: int
    has_learnt: bool
    """Whether there may be anything that no merge has."""
    num_loads: int
    loads: int
    """A checksum of the loaded weights."""
    is_last: bool = False
    """Whether the rank ends a period, and may wait long for the others."""


class Drained(NamedTuple):
    """Says that its sender sends no answer any more until the joint call is over."""


class Leaving(NamedTuple):
    """The last message of a rank that detaches."""


RoundMessage = Push | Opening | Snapshot | Pull | Merge | Note | Drained | Leaving
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(RoundMessage)}

_WITH_PAYLOAD = (Push, Snapshot, Merge)


def _head_bytes(world: int) -> int:
    """The bytes of a head, which may list a contribution of each rank."""
    return 512 + 320 * world


def _written(message: RoundMessage, size_bytes: int) -> Tensor:
    """The head of a message; a payload is there by its number of bytes."""
    fields = [*message]
    if isinstance(message, _WITH_PAYLOAD):
        fields[-1] = message.payload_B.numel()
    text = json.dumps([type(message).__name__, *fields]).encode()
    assert len(text) <= size_bytes, "a head has a fixed size"
    return torch.frombuffer(bytearray(text.ljust(size_bytes)), dtype=torch.uint8)


def _read(head_B: Tensor) -> RoundMessage:
    """The message of a head; it has its payload's memory, if there is any."""
    name, *fields = json.loads(head_B.numpy().tobytes())
    kind = _KINDS[name]
    if kind is Merge:
        fields[2] = tuple(Contribution(*entry) for entry in fields[2])
    if kind in _WITH_PAYLOAD:
        fields[-1] = torch.empty(fields[-1], dtype=torch.uint8, device="cpu")
    message: RoundMessage = kind(*fields)
    return message


class Mail:
    """The connections of one rank to all others.

    Args:
        channel: A process group of all ranks, for nothing else.
        timeout: How long a head or a piece of a payload may be under way.
        take: Called with a message and its sender, in a thread of the sender's.
        fail: Called with the error of a connection, in the same way.
    """

    def __init__(
        self,
        channel: Channel,
        timeout: timedelta,
        take: Callable[[int, RoundMessage], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._sent_bytes: Counter[int] = Counter()
        self._left: set[int] = set()
        """The ranks that have detached."""
        self._channel = channel
        self._timeout = timeout
        self._take = take
        self._fail = fail
        self._is_closing = False
        self._head_bytes = _head_bytes(channel.size())
        others = set(range(channel.size())) - {channel.rank()}
        self._outgoing: dict[int, SimpleQueue[Any]] = {
            rank: SimpleQueue() for rank in others
        }
        self._threads = [
            threading.Thread(
                target=partial(self._carry, is_over, rank),
                name=f"gradwire rounds {name} {rank}",
                daemon=True,
            )
            for name, is_over in (
                ("to", self._sends_last),
                ("from", self._receives_last),
            )
            for rank in others
        ]
        for thread in self._threads:
            thread.start()

    @property
    def sent_bytes(self) -> int:
        """The bytes of all messages that have been sent."""
        return self._sent_bytes.total()

    def send(
        self, dst: int, message: RoundMessage, on_sent: Callable[[], None] | None = None
    ) -> None:
        """Sends a message beside what this thread does; ``on_sent`` is called then."""
        self._outgoing[dst].put((message, on_sent))

    def close(self, *, is_whole: bool) -> None:
        """Says that this rank leaves, and waits for the threads for some seconds.

        It does not wait in a run that has failed, which is not ``is_whole``.
        """
        self._is_closing = True
        for outgoing in self._outgoing.values():
            outgoing.put((Leaving(), None))
        end_s = time.monotonic() + (_CLOSING_S if is_whole else 0.0)
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _carry(self, is_over: Callable[[int], bool], rank: int) -> None:
        try:
            while not is_over(rank):
                pass
        except BaseException as error:
            if not (self._is_closing or rank in self._left):
                self._fail(error)

    # One message at a time: its memory is free once the function returns.

    def _sends_last(self, dst: int) -> bool:
        """Sends the next message; returns whether it was the last one."""
        message, on_sent = self._outgoing[dst].get()
        parts = [_written(message, self._head_bytes)]
        works = [self._channel.send(parts, dst, _HEAD_TAG)]
        if isinstance(message, _WITH_PAYLOAD):
            pieces = torch.split(message.payload_B.cpu(), PIECE_BYTES)
            parts += pieces
            works += [self._channel.send([p], dst, _PAYLOAD_TAG) for p in pieces]
        for work in works:
            work.wait(self._timeout)
        self._sent_bytes[dst] += sum(part.numel() for part in parts)
        if on_sent is not None:
            on_sent()
        return isinstance(message, Leaving)

    def _receives_last(self, src: int) -> bool:
        """Receives the next message; returns whether it was the last one."""
        head_B = torch.empty(self._head_bytes, dtype=torch.uint8, device="cpu")
        self._channel.recv([head_B], src, _HEAD_TAG).wait()
        message = _read(head_B)
        if isinstance(message, _WITH_PAYLOAD):
            pieces = torch.split(message.payload_B, PIECE_BYTES)
            works = [self._channel.recv([p], src, _PAYLOAD_TAG) for p in pieces]
            for work in works:
                work.wait(self._timeout)
        is_last = isinstance(message, Leaving)
        if is_last:
            self._left.add(src)
        self._take(src, message)
        return is_last
