"""Mail: messages of partial rounds between ranks, beside the training step.

Each rank has two threads for each other rank: one sends and one receives. A message is
a head of fixed size, and the bytes of a merge's list and of a payload. Messages of one
rank to another arrive in order. A receive waits for as long as its sender lives, since
no rank knows when a message will come. A payload travels in pieces: the time-out bounds
each of them, and not the time of a long payload.
"""

import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from ...exchange.rounds import Contribution, Merge, Pull, Push, Request, Snapshot
from ..transport.direct import PIECE_BYTES
from ..transport.wire import Channel

_HEAD_BYTES = 256
_HEAD_TAG = 1
_PAYLOAD_TAG = 2
_CUT_TAG = 3
_CLOSING_S = 10.0
"""Seconds that ``close`` waits for messages under way, and for the other ranks."""
NAME = "gradwire rounds"
"""The beginning of the names of all threads of rounds."""


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


class Invitation(NamedTuple):
    """Asks all ranks to meet a newcomer."""

    number: int
    label: int
    """Its number in the job."""


class Leaving(NamedTuple):
    """The last message of a rank that detaches."""


RoundMessage = Request | Pull | Merge | Note | Drained | Invitation | Leaving
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(RoundMessage)}


def _text(value: Any, least_bytes: int = 0) -> Tensor:
    """A value as JSON, padded."""
    text = json.dumps(value).encode().ljust(least_bytes)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _read(text_B: Tensor) -> Any:
    return json.loads(text_B.numpy().tobytes())


def _parts(message: RoundMessage) -> list[Tensor]:
    """The head of a message, then what follows it: a list, and a payload."""
    fields: list[Any] = [*message]
    rest: list[Tensor] = []
    if isinstance(message, Push | Merge | Snapshot):
        rest.append(fields.pop().cpu())
    if isinstance(message, Merge | Snapshot):
        rest.insert(0, _text(fields.pop()))
    sizes = [part.numel() for part in rest]
    head_B = _text([type(message).__name__, sizes, *fields], _HEAD_BYTES)
    assert head_B.numel() == _HEAD_BYTES, "a head has a fixed size"
    return [head_B, *rest]


def _message(name: str, fields: list[Any], rest: list[Any]) -> RoundMessage:
    """The message that ``_parts`` has written."""
    if _KINDS[name] is Merge:
        rest[0] = tuple(Contribution(*entry) for entry in _read(rest[0]))
    if _KINDS[name] is Snapshot:
        rest[0] = _read(rest[0])
    message: RoundMessage = _KINDS[name](*fields, *rest)
    return message


def _pieces(parts: Iterable[Tensor]) -> list[Tensor]:
    return [piece for part in parts for piece in torch.split(part, PIECE_BYTES)]


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
        others = set(range(channel.size())) - {channel.rank()}
        self._outgoing: dict[int, SimpleQueue[Any]] = {
            rank: SimpleQueue() for rank in others
        }
        self._threads = [
            threading.Thread(
                target=partial(self._carry, is_over, rank),
                name=f"{NAME} {name} {rank}",
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
        if is_whole:
            _join(self._threads)

    def end(self) -> None:
        """Ends this mail without a message, as the ranks connect anew.

        A rank that has not heard of it yet would take this one for detached.
        """
        self._is_closing = True
        for outgoing in self._outgoing.values():
            outgoing.put((None, None))

    def cut(self) -> None:
        """Closes all connections, once all ranks have connected anew.

        gloo does so when a receive has waited for too long. Otherwise the threads would
        wait until the process ends, and abort it.
        """
        nothing_1 = torch.empty(1, dtype=torch.uint8, device="cpu")
        for rank in self._outgoing:
            with suppress(RuntimeError):
                receive = self._channel.recv([nothing_1], rank, _CUT_TAG)
                receive.wait(timedelta(milliseconds=1))

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
        if message is None:
            return True
        head_B, *rest = _parts(message)
        works = [self._channel.send([head_B], dst, _HEAD_TAG)]
        works += [self._channel.send([p], dst, _PAYLOAD_TAG) for p in _pieces(rest)]
        for work in works:
            work.wait(self._timeout)
        self._sent_bytes[dst] += sum(part.numel() for part in (head_B, *rest))
        if on_sent is not None:
            on_sent()
        return isinstance(message, Leaving)

    def _receives_last(self, src: int) -> bool:
        """Receives the next message; returns whether it was the last one."""
        head_B = torch.empty(_HEAD_BYTES, dtype=torch.uint8, device="cpu")
        self._channel.recv([head_B], src, _HEAD_TAG).wait()
        name, sizes, *fields = _read(head_B)
        rest = [torch.empty(n, dtype=torch.uint8, device="cpu") for n in sizes]
        works = [self._channel.recv([p], src, _PAYLOAD_TAG) for p in _pieces(rest)]
        for work in works:
            work.wait(self._timeout)
        message = _message(name, fields, rest)
        is_last = isinstance(message, Leaving)
        if is_last:
            self._left.add(src)
        self._take(src, message)
        return is_last


def _join(threads: Iterable[threading.Thread]) -> None:
    """Waits for threads to end, for some seconds."""
    end_s = time.monotonic() + _CLOSING_S
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))


def _join_all() -> None:
    """Waits for all threads of rounds, which end as the other ranks leave.

    A thread that returns from gloo into an interpreter that has ended aborts.
    """
    _join(one for one in threading.enumerate() if one.name.startswith(NAME))


# Finalizers are called in reverse order at the end: this one after all handles'.
weakref.finalize(Mail, _join_all)
