"""RoundService: a thread that carries a rank's partial rounds beside its training.

The thread owns the rounds of this rank's fragments. It shares the inbox of merges with
the training thread, and nothing else. In a joint call, such as a checkpoint, ranks come
to a point where no message is on its way. Each rank announces that it has come, and
pushes no more. Once a rank has heard all, it answers no more and says so. Once it has
heard that from all, all that was sent has arrived. Later messages wait until the rank
goes on.

If ranks may be lost, this thread goes on without them (``going_on``), and training goes
on meanwhile. Messages of the connections before are dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from typing import Any

from ...errors import ExitCode, RankFailed
from ...exchange.rounds import (
    Answer,
    Merge,
    PartialRounds,
    Request,
    Snapshot,
)
from ..engine.engine import Engine
from ..liveness.alarm import listed, said
from ..survive.going_on import Connect, Successors, go_on_without
from ..transport.wire import as_on_a_lane, in_background
from .mail import NAME, Drained, Leaving, Mail, Note, RoundMessage

_LOOK_S = 0.5
"""Seconds between two looks whether the run has failed."""
_WARN_S = 30.0
"""Seconds until a rank warns that others do not come to a joint call."""
_WAITING = (
    "only ranks %s have come to end_period() or a checkpoint, and wait for the others "
    "to make the same call; save a framework's checkpoint on all ranks"
)
_log = logging.getLogger("gradwire")
_Event = Callable[[], None]


class RoundService:
    """Carries messages between one rank's rounds and all ranks'.

    Args:
        engine: The engine, whose ranks these are.
        rounds: This rank's part in the rounds.
        connect: Makes the engine of the ranks that go on. None (the default): a lost
            rank ends the run.
        on_epoch: Called with the ranks that go on, in this thread.
    """

    def __init__(
        self,
        engine: Engine,
        rounds: PartialRounds,
        connect: Connect | None = None,
        on_epoch: Callable[[Successors], object] = lambda left: None,
    ) -> None:
        self.rounds = rounds
        self._connect = connect
        self._on_epoch = on_epoch
        self._first = engine.who.numbers
        self._labels: Sequence[int] = range(engine.world)
        """The rounds' numbers of the engine's ranks."""
        self._failure: BaseException | None = None
        """The error that ends this rank's run, although ranks may be lost."""
        self._note: Note | None = None
        """This rank's note of a joint call that is not over."""
        self._num_met = 0
        """Joint calls to which all ranks have come."""
        self._num_calls = 0
        """Joint calls that are over."""
        self._put_off: list[_Event] = []
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
        self._open_mail()
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._thread.start()

    def _open_mail(self) -> None:
        """Connects the engine's ranks."""
        engine = self._engine
        if self._connect is not None:
            engine.on_failure = partial(self._notice, engine)
            engine.check()
        if engine.world > 1:
            channel = engine.open_beside("rounds")
            take = partial(self._take, engine)
            self._mail = Mail(
                channel, engine.timeout, take, partial(self._lose, engine)
            )

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has sent for its rounds."""
        return self._mail.sent_bytes if self._mail else 0

    def ask(self, requests: Sequence[Request]) -> None:
        """Sends requests to their ranks, beside training."""
        engine = self._engine
        for request in requests:
            target = self.rounds.owner_of[request.fragment]
            if isinstance(request, Snapshot):
                target = request.rank
            self._send(target, request)
        for request in requests:
            if isinstance(request, Snapshot):
                self._queue.put(partial(self._release, engine, request.fragment))

    def check(self) -> None:
        """Raises if the run has failed, or a rank has left without the others."""
        self._check(self._left)

    def _check(self, left: set[int]) -> None:
        if self._failure is not None:
            raise self._failure
        if self._connect is None:
            self._engine.check()
        if left:
            ranks = tuple(self._labels.index(label) for label in sorted(left))
            error = self._engine.lose(
                ranks,
                self.rounds.step,
                f"rank {listed(ranks)} of {self._engine.world} detached before the "
                "others, which train on; call end_period() on all ranks before "
                "detach()",
                "its last message",
            )
            if self._connect is None:
                raise error

    def meet(self, note: Note, settle: Callable[[], None]) -> list[Note]:
        """Waits until all ranks have come to a joint call, and all has arrived.

        ``settle`` takes merges in. Returns all ranks' notes, in rank order. No rank
        sends until ``go_on``. Raises on all ranks alike if they make different calls.
        """
        self._queue.put(partial(self._announce, note))
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

        Raises if one of the ``needed`` ranks leaves; None: all are needed, to come to a
        joint call. If they do not come for long, that is warned of once.
        """
        warns_at_s = time.monotonic() + _WARN_S
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
                if needed is None and time.monotonic() >= warns_at_s:
                    _log.warning(_WAITING, sorted({self._engine.rank, *self._notes}))
                    warns_at_s = inf
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
        if threading.current_thread().name.startswith(NAME):
            in_background(self.close)
            return
        self._queue.put(None)
        if self._mail is not None:
            self._mail.close(is_whole=not self._engine.has_failed)
        self._thread.join(_LOOK_S)
        # The handle, which keeps this, would keep the channel's connections.
        self._mail = None
        if self._labels != range(len(self._first)):
            self._engine.close()

    # From here on in the service's thread.

    def _run(self) -> None:
        try:
            with as_on_a_lane():
                while self._do_next():
                    pass
        except BaseException as error:
            engine = self._engine
            text = f"rank {engine.rank} of {engine.world} raised {said(error)}"
            step = self.rounds.step
            ranks = (engine.rank,)
            how = "its rounds"
            self._failure = engine.lose(ranks, step, text, how, ExitCode.BROKEN)

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
        return self.rounds.rank in self._drained

    def _take(self, engine: Engine, src: int, message: RoundMessage) -> None:
        self._queue.put(partial(self._arrived, engine, src, message))

    def _arrived(self, engine: Engine, src: int, message: RoundMessage) -> None:
        if engine is self._engine:
            self._hear(self._labels[src], message)

    def _hear(self, src: int, message: RoundMessage) -> None:
        if src in self._drained and not isinstance(message, Snapshot):
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
                    self._drained.add(self.rounds.rank)
                    self._meet()
            case Drained():
                self._drained.add(src)
                self._meet()
            case Leaving():
                self._left.add(src)
            case _:
                self._answer(self.rounds.receive(message, time.monotonic()))
                self._meet()
        self._news.set()

    def _announce(self, note: Note) -> None:
        """Notes that this rank has come to a joint call, and says so."""
        self._note = note
        self._send_to_others(note)
        self._hear(self.rounds.rank, note)

    def _meet(self) -> None:
        """Ends the wait of a joint call, if all has arrived; no epoch begins then."""
        is_waiting = self._num_met == self._num_calls and not self.rounds.awaited
        if is_waiting and len(self._drained) == self._engine.world:
            self._num_met += 1
            self._met.append([self._notes[rank] for rank in sorted(self._notes)])

    def _close_due(self) -> None:
        self._answer(self.rounds.due(time.monotonic()))

    def _answer(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            on_sent = None
            if isinstance(answer, Merge) and self._mail is not None:
                fragment = answer.fragment
                self.rounds.owners[fragment].is_sending = True
                self._num_receivers[fragment] = self._engine.world - 1
                sent = partial(self._sent, self._engine, fragment, time.monotonic())
                on_sent = partial(self._queue.put, sent)
            self.rounds.receive(answer, time.monotonic())
            self._send_to_others(answer, on_sent)
        self._news.set()

    def _sent(self, engine: Engine, fragment: int, since_s: float) -> None:
        """Notes that one more rank has a merge."""
        if engine is not self._engine:
            return
        self._num_receivers[fragment] -= 1
        if not self._num_receivers[fragment]:
            self.rounds.owners[fragment].sync_s = time.monotonic() - since_s
            self._release(engine, fragment)

    def _release(self, engine: Engine, fragment: int) -> None:
        """Lets a round close, as what goes before is on its way."""
        if engine is self._engine:
            self.rounds.owners[fragment].is_sending = False
            if not self._is_drained:
                self._close_due()

    def _notice(self, engine: Engine, failure: BaseException) -> None:
        self._queue.put(partial(self._lose_ranks, engine, failure))

    def _lose_ranks(self, engine: Engine, failure: BaseException) -> None:
        """Goes on without lost ranks, now or after the joint call under way."""
        if engine is not self._engine:
            return
        if self._num_met > self._num_calls:
            self._put_off.append(partial(self._lose_ranks, engine, failure))
            return
        if self._mail is not None:
            self._mail.end()
        try:
            self._begin_epoch(engine, failure)
        except BaseException as error:
            self._failure = error
        self._news.set()

    def _begin_epoch(self, engine: Engine, failure: BaseException) -> None:
        """Begins the next epoch of rounds among the ranks that are left."""
        assert self._connect is not None
        own = [self._num_met, *self.rounds.row()]
        while True:
            left = go_on_without(engine, failure, self._connect, own)
            engine = left.engine
            self._mail = None
            self._engine = engine
            try:
                self._open_mail()
                break
            except RankFailed as later:
                failure = later
        first = self._first
        numbers = engine.who.numbers
        self._labels = [first.index(n) if n in first else n for n in numbers]
        rows = left.values
        self._num_receivers.clear()
        self._left.clear()
        self._held.clear()
        self._drained.clear()
        of_rounds = [row[1:] for row in rows]
        self.rounds.begin_epoch(dict(zip(self._labels, of_rounds, strict=True)))
        self._on_epoch(left)
        if max(row[0] for row in rows) > self._num_met:
            # Others have met: they have heard this rank, which has all notes then.
            self._drained.update(self._labels)
            self._meet()
        else:
            self._notes.clear()
            if self._note is not None:
                self._announce(self._note)

    def _go_on(self) -> None:
        self._note = None
        self._num_calls += 1
        put_off = self._put_off
        self._put_off = []
        for event in put_off:
            self._queue.put(event)
        for owner in self.rounds.owners.values():
            owner.come_back()
        held = self._held
        self._held = defaultdict(list)
        self._notes = {}
        self._drained = set()
        for src, messages in held.items():
            for message in messages:
                self._hear(src, message)

    # From any thread.

    def _send(
        self, dst: int, message: RoundMessage, on_sent: _Event | None = None
    ) -> None:
        if dst == self.rounds.rank:
            own = partial(self._arrived, self._engine, self._engine.rank, message)
            self._queue.put(own)
        elif (mail := self._mail) is not None and dst in self._labels:
            mail.send(self._labels.index(dst), message, on_sent)

    def _send_to_others(
        self, message: RoundMessage, on_sent: _Event | None = None
    ) -> None:
        for rank in self._labels:
            if rank != self.rounds.rank:
                self._send(rank, message, on_sent)

    def _lose(self, engine: Engine, error: BaseException) -> None:
        if not engine.has_failed:
            engine.unreachable("exchange rounds", error, self.rounds.step)

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
