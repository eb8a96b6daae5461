"""RoundService: a thread that carries a rank's partial rounds beside its training.

The thread owns the rounds of this rank's fragments. It shares the inbox of merges with
the training thread, and nothing else. In a joint call, such as a checkpoint, ranks come
to a point where no message is on its way. Each rank announces that it has come, and
pushes no more. Once a rank has heard all, it answers no more and says so. Once it has
heard that from all, all that was sent has arrived. Later messages wait until the rank
goes on.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from typing import Any

from ...errors import ExitCode
from ...exchange.rounds import Answer, Merge, PartialRounds, Request
from ..engine.engine import Engine
from ..liveness.alarm import listed, said
from ..transport.wire import as_on_a_lane, in_background
from .mail import Drained, Leaving, Mail, Note, RoundMessage

_LOOK_S = 0.5
"""Seconds between two looks whether the run has failed."""
_NAME = "gradwire rounds"
"""The beginning of the names of all threads of rounds."""
_Event = Callable[[], None]


class RoundService:
    """Carries messages between one rank's rounds and all ranks'.

    Args:
        engine: The engine, whose ranks these are.
        rounds: This rank's part in the rounds.
    """

    def __init__(self, engine: Engine, rounds: PartialRounds) -> None:
        self.rounds = rounds
        self._engine = engine
        self._queue: SimpleQueue[_Event | None] = SimpleQueue()
        self._news = threading.Event()
        """Set when there is something for the training thread."""
        self._notes: dict[int, Note] = {}
        self._drained: set[int] = set()
        """The ranks whose messages have all arrived, in a joint call."""
        self._met: deque[list[Note]] = deque()
        """The notes of the joint call to which all ranks have come."""
        self._left: set[int] = set()
        """The ranks that have detached."""
        self._held: dict[int, list[RoundMessage]] = defaultdict(list)
        """Messages of ranks that have gone on from a joint call before this one."""
        self._num_receivers: Counter[int] = Counter()
        """The ranks that do not have a fragment's last merge yet."""
        self._mail: Mail | None = None
        if engine.world > 1:
            channel = engine.open_beside("rounds")
            self._mail = Mail(channel, engine.timeout, self._take, self._lose)
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
        self._thread.start()

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has sent for its rounds."""
        return self._mail.sent_bytes if self._mail else 0

    def ask(self, requests: Iterable[Request]) -> None:
        """Sends requests to the owners of their fragments, beside training."""
        for request in requests:
            self._send(request.fragment % self._engine.world, request)

    def check(self) -> None:
        """Raises if the run has failed, or a rank has left without the others."""
        self._check(self._left)

    def _check(self, left: set[int]) -> None:
        self._engine.check()
        if left:
            ranks = tuple(sorted(left))
            raise self._engine.lose(
                ranks,
                self.rounds.step,
                f"rank {listed(ranks)} of {self._engine.world} detached before the "
                "others, which train on; call end_period() on all ranks before "
                "detach()",
                "its last message",
            )

    def meet(self, note: Note, settle: Callable[[], None]) -> list[Note]:
        """Waits until all ranks have come to a joint call, and all has arrived.

        ``settle`` takes merges in. Returns all ranks' notes, in rank order. No rank
        sends until ``go_on``. Raises on all ranks alike if they make different calls.
        """
        # To others first: this rank's thread may answer its own note at once.
        self._send_to_others(note)
        self._send(self._engine.rank, note)
        self.wait_for(lambda: bool(self._met), settle)
        notes = self._met.popleft()
        self._refuse_unlike(notes)
        return notes

    def wait_for(
        self,
        is_there: Callable[[], bool],
        settle: Callable[[], None],
        needed: Callable[[], set[int]] | None = None,
    ) -> None:
        """Takes merges in until a condition holds.

        Raises if one of the ``needed`` ranks leaves; None: all are needed.
        """
        while True:
            # read first: all that a rank has sent before it left is there by then
            left = set(self._left)
            is_over = is_there()
            settle()
            if is_over:
                return
            # where it holds only now, merges may have come since settle
            if not is_there():
                self._check(left if needed is None else left & needed())
                self._news.wait(_LOOK_S)
                self._news.clear()

    def go_on(self) -> None:
        """Ends a joint call on this rank."""
        self._queue.put(self._go_on)

    def close(self) -> None:
        """Ends the threads; ranks that train on hear that this one has left."""
        if self._engine.is_copy:
            return
        # the garbage collector may call this anywhere
        if threading.current_thread().name.startswith(_NAME):
            in_background(self.close)
            return
        self._queue.put(None)
        if self._mail is not None:
            self._mail.close(is_whole=not self._engine.has_failed)
        self._thread.join(_LOOK_S)
        # The handle, which keeps this, would keep the channel's connections.
        self._mail = None

    # From here on in the service's thread.

    def _run(self) -> None:
        try:
            with as_on_a_lane():
                while self._do_next():
                    pass
        except BaseException as error:
            engine = self._engine
            text = f"rank {engine.rank} of {engine.world} raised {said(error)}"
            engine.lose(
                (engine.rank,), self.rounds.step, text, "its rounds", ExitCode.BROKEN
            )

    def _do_next(self) -> bool:
        """Does what the next event asks for; returns whether others may come."""
        event = self._next()
        if event is not None:
            event()
        return event is not None

    def _next(self) -> _Event | None:
        """The next event; the end of a grace is one."""
        closes_at_s = self.rounds.closes_at_s
        if closes_at_s in (None, inf) or self._is_drained:
            return self._queue.get()
        assert closes_at_s is not None
        wait_s = closes_at_s - time.monotonic()
        if wait_s > 0:
            try:
                return self._queue.get(timeout=min(wait_s, threading.TIMEOUT_MAX))
            except Empty:
                pass
        return self._close_due

    @property
    def _is_drained(self) -> bool:
        return self._engine.rank in self._drained

    def _take(self, src: int, message: RoundMessage) -> None:
        self._queue.put(partial(self._arrived, src, message))

    def _arrived(self, src: int, message: RoundMessage) -> None:
        if src in self._drained:
            self._held[src].append(message)
            return
        match message:
            case Note():
                self._notes[src] = message
                if message.is_last:
                    for owner in self.rounds.owners.values():
                        self._answer(owner.go_without(src, time.monotonic()))
                if len(self._notes) == self._engine.world:
                    self._send_to_others(Drained())
                    self._note_drained(self._engine.rank)
            case Drained():
                self._note_drained(src)
            case Leaving():
                self._left.add(src)
            case _:
                self._answer(self.rounds.receive(message, time.monotonic()))
        self._news.set()

    def _note_drained(self, rank: int) -> None:
        self._drained.add(rank)
        if len(self._drained) == self._engine.world:
            self._met.append([self._notes[rank] for rank in sorted(self._notes)])

    def _close_due(self) -> None:
        self._answer(self.rounds.due(time.monotonic()))

    def _answer(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            on_sent = None
            if isinstance(answer, Merge) and self._mail is not None:
                fragment = answer.fragment
                self.rounds.owners[fragment].is_sending = True
                self._num_receivers[fragment] = self._engine.world - 1
                sent = partial(self._sent, fragment, time.monotonic())
                on_sent = partial(self._queue.put, sent)
            self.rounds.receive(answer, time.monotonic())
            self._send_to_others(answer, on_sent)
        self._news.set()

    def _sent(self, fragment: int, since_s: float) -> None:
        """Notes that one more rank has a merge."""
        self._num_receivers[fragment] -= 1
        if not self._num_receivers[fragment]:
            owner = self.rounds.owners[fragment]
            owner.is_sending = False
            owner.sync_s = time.monotonic() - since_s
            if not self._is_drained:
                self._close_due()

    def _go_on(self) -> None:
        for owner in self.rounds.owners.values():
            owner.come_back()
        held = self._held
        self._held = defaultdict(list)
        self._notes = {}
        self._drained = set()
        for src, messages in held.items():
            for message in messages:
                self._arrived(src, message)

    # From any thread.

    def _send(
        self, dst: int, message: RoundMessage, on_sent: _Event | None = None
    ) -> None:
        if dst == self._engine.rank:
            self._take(dst, message)
        elif (mail := self._mail) is not None:
            mail.send(dst, message, on_sent)

    def _send_to_others(
        self, message: RoundMessage, on_sent: _Event | None = None
    ) -> None:
        for rank in range(self._engine.world):
            if rank != self._engine.rank:
                self._send(rank, message, on_sent)

    def _lose(self, error: BaseException) -> None:
        if not self._engine.has_failed:
            self._engine.unreachable("exchange rounds", error, self.rounds.step)

    def _refuse_unlike(self, notes: list[Note]) -> None:
        for field, what, remedy in _ALIKE:
            values: list[Any] = [getattr(note, field) for note in notes]
            if len({*values}) > 1:
                ranks = tuple(r for r, v in enumerate(values) if v != values[0])
                text = (
                    f"rank {listed(ranks)} of {len(notes)} {what} than rank 0 "
                    f"({values[ranks[0]]}, {values[0]}); {remedy}"
                )
                how = "the ranks' announcements"
                step = self.rounds.step
                raise self._engine.lose(ranks, step, text, how, ExitCode.MISTAKE)


_ALIKE = (
    ("call", "made another joint call", "make the same calls in order on all ranks"),
    ("num_loads", "loaded weights more or less often", "load on all ranks alike"),
    ("loads", "loaded other weights", "load the same weights on all ranks"),
)
