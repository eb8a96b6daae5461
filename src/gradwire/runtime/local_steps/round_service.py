"""RoundService: a thread that carries a rank's partial rounds beside its training.

The thread collects the pushes (pseudo-gradients) to this rank's fragments, and sends
their mean, the merge, to all ranks. It shares the inbox of merges with the training
thread, and nothing else.

In a joint call, such as a checkpoint, ranks come to a point where no message is on its
way. Each rank announces the call by a `Note`, and pushes no more. Once it has heard the
notes of all ranks, it sends no more merges, and announces that (`Drained`). Once it has
heard this from all ranks, all messages have arrived. Later messages wait until the rank
goes on.

If ranks may be lost, this thread goes on without them (``going_on``), and training goes
on meanwhile. Messages on the old connections are dropped.

Rank 0 sees a newcomer in the store, and invites all ranks to meet it (`rejoin`). They
connect beside their rounds. Then this thread stands still until all ranks have
announced their place: the merges that they have. By these places the next epoch begins.
A rank that is cut off trains on alone, and comes back in the same way.
"""

import json
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from ...errors import ExitCode, RankFailed, log
from ...exchange.rounds import (
    Answer,
    Merge,
    PartialRounds,
    Request,
    Snapshot,
)
from ..engine.engine import Engine
from ..liveness.alarm import listed, said
from ..liveness.pulse import PATIENCE_S
from ..survive.going_on import Connect
from ..survive.rejoin import Admitted, Lookout, Offer, Returning, come_together
from ..transport.wire import (
    REJOINED,
    Channel,
    as_on_a_lane,
    has_store,
    in_background,
    own_store,
)
from .going_on import Successors, channel_of, go_on_without
from .mail import NAME, Drained, Invitation, Leaving, Mail, Note, RoundMessage

_LOOK_S = 0.5
"""Seconds between two looks whether the run has failed."""
_WARN_S = 30.0
"""Seconds until a rank warns that others do not come to a joint call."""
_WAITING = (
    "only ranks %s have come to end_period() or a checkpoint, and wait for the others "
    "to make the same call; save a framework's checkpoint on all ranks"
)
_Event = Callable[[], None]


class Survival(NamedTuple):
    """How a run goes on without lost ranks, and with newcomers.

    Args:
        connect: Makes the engine of the ranks that go on.
        on_epoch: Called with these ranks, in the thread of the rounds.
        fingerprint: The fingerprint that a newcomer must have, too.
        shared: Returns the values that a newcomer takes over beside the rounds.
        first_label: The number in the job of the first newcomer.
    """

    connect: Connect
    on_epoch: Callable[[Successors], object]
    fingerprint: str
    shared: Callable[[], Mapping[str, Any]]
    first_label: int


@dataclass(eq=False)
class Admission:
    """The way of a newcomer into the run, as this rank sees it."""

    own: Future[dict[str, Any]] = field(default_factory=Future)
    """This rank's place in the rounds, once its thread stands still."""
    meeting: Future[Admitted | str] | None = None
    """The answer of ``come_together``, which connects all ranks in the background."""
    channel: Channel | None = None
    since_s: float = field(default_factory=time.monotonic)


class RoundService:
    """Carries messages between one rank's rounds and all ranks'.

    Args:
        engine: The engine, whose ranks these are.
        rounds: This rank's part in the rounds.
        survival: How the run goes on. None (the default): a lost rank ends it.
        run: The run's ranks, into which this newcomer has come. None (the default): all
            ranks begin together.
    """

    def __init__(
        self,
        engine: Engine,
        rounds: PartialRounds,
        survival: Survival | None = None,
        run: Successors | None = None,
    ) -> None:
        self.rounds = rounds
        self._survival = survival
        self._first = engine
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
        """Losses of ranks that are handled after the joint call under way."""
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
        self._catching_up: set[tuple[int, int]] = set()
        """Fragments and ranks whose parts of the anchor are on their way."""
        self._lookout: Lookout | None = None
        self._admission: Admission | None = None
        """The newcomer that is on its way in."""
        self._parted_by: BaseException | None = None
        """The error that has cut this rank off; None while it is among the others."""
        self._gives_up_s = inf
        """When a rank that is cut off ends, if the others have not taken it back."""
        self._invited: set[int] = set()
        """The newcomers that this rank has invited all ranks to meet."""
        self._mail: Mail | None = None
        if run is None:
            self._open_mail(channel_of(engine))
        else:
            self._num_met = self._num_calls = max(one["met"] for one in run.values)
            self._begin_epoch(run)
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._thread.start()

    def _open_mail(self, channel: Channel | None) -> None:
        """Opens the mail of the engine's ranks, and looks out for newcomers."""
        engine = self._engine
        survival = self._survival
        self._mail = None
        if channel is not None:
            take = partial(self._take, engine)
            fail = partial(self._lose, engine)
            self._mail = Mail(channel, engine.timeout, take, fail)
            engine.watch(self._awaited)
        if survival is None:
            return
        engine.on_failure = partial(self._notice, engine)
        engine.survive()
        try:
            engine.check()
        except RankFailed as failure:
            self._notice(engine, failure)
        looks_out = engine.rank == 0 and self._parted_by is None and has_store()
        if self._lookout is not None and not looks_out:
            self._lookout.close()
            self._lookout = None
        elif looks_out and self._lookout is None:
            self._lookout = Lookout(survival.fingerprint, self._see)

    def _awaited(self) -> list[int]:
        """The other ranks that have not detached, whose signs of life are watched."""
        gone = {*self._left, self.rounds.rank}
        return [rank for rank, n in enumerate(self._labels) if n not in gone]

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has sent for its rounds."""
        return self._mail.sent_bytes if self._mail else 0

    def ask(self, requests: Sequence[Request]) -> None:
        """Sends requests to their ranks, beside training."""
        engine = self._engine
        for request in requests:
            if isinstance(request, Snapshot):
                self._queue.put(partial(self._hand_on, engine, request))
            else:
                self._send(self.rounds.owner_of[request.fragment], request)

    def check(self) -> None:
        """Raises if the run has failed, or a rank has left without the others."""
        self._check(self._left)

    def _check(self, left: set[int]) -> None:
        if self._failure is not None:
            raise self._failure
        if self._survival is None:
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
            if self._survival is None:
                raise error

    def meet(self, note: Note, settle: Callable[[], None]) -> list[Note]:
        """Waits until all ranks have come to a joint call, and all messages are here.

        ``settle`` applies merges. Returns all ranks' notes, in rank order; no notes if
        the others made the call while this rank was away. No rank sends until
        ``go_on``. Raises on all ranks alike if they make different calls.
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
        """Applies merges by ``settle`` until ``is_there`` returns True.

        Raises if one of the ``needed`` ranks leaves. None: this waits for all ranks to
        come to a joint call. If some do not come for long, one warning is given.
        """
        warns_at_s = time.monotonic() + _WARN_S
        while True:
            # read first: all that a rank has sent before it left is there by then
            left = set(self._left)
            is_over = is_there()
            settle()
            if is_over:
                return
            # If it holds only now, merges may have come since: the loop settles again.
            if not is_there():
                self._check(left if needed is None else left & needed())
                if needed is None and time.monotonic() >= warns_at_s:
                    log.warning(_WAITING, sorted({self._engine.rank, *self._notes}))
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
        if self._lookout is not None:
            self._lookout.close()
        if self._mail is not None:
            self._mail.close(is_whole=not self._engine.failure)
        self._thread.join(_LOOK_S)
        # The handle, which keeps this, would keep the channel's connections.
        self._mail = None
        if self._engine is not self._first:
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
            case Invitation():
                self._come_together(message)
            case _:
                self._answer(self.rounds.receive(message, time.monotonic()))
                self._meet()
        self._news.set()

    def _announce(self, note: Note) -> None:
        """Notes that this rank has come to a joint call, and says so.

        If the others have made the call while this rank was away, it is over.
        """
        self._note = note
        if self._num_met > self._num_calls:
            log.warning("the others made %s while this rank was away", note.call)
            self._met.append([])
            self._news.set()
            return
        self._send_to_others(note)
        self._hear(self.rounds.rank, note)

    def _meet(self) -> None:
        """Ends the wait of a joint call, if all messages have arrived.

        It does not end while an epoch begins, or this rank is cut off.
        """
        is_whole = self._parted_by is None and not self.rounds.awaited
        is_waiting = self._num_met == self._num_calls and is_whole
        if is_waiting and len(self._drained) == self._engine.world:
            self._num_met += 1
            self._met.append([self._notes[rank] for rank in sorted(self._notes)])

    def _close_due(self) -> None:
        self._answer(self.rounds.due(time.monotonic()))

    def _answer(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self.rounds.receive(answer, time.monotonic())
            if isinstance(answer, Merge):
                self._send_merge(answer)
            else:
                self._send_to_others(answer)
        self._news.set()

    def _send_merge(self, merge: Merge) -> None:
        """Sends a merge; the fragment's next round closes once all ranks have it.

        Ranks that still get a part of the anchor are not waited for: their merges are
        sent after that part.
        """
        fragment = merge.fragment
        others = {*self._labels} - {self.rounds.rank}
        late = {rank for rank in others if (fragment, rank) in self._catching_up}
        self._num_receivers[fragment] = len(others - late)
        self.rounds.owners[fragment].is_sending = others > late
        sent = partial(self._sent, self._engine, fragment, time.monotonic())
        for rank in others:
            is_held = rank not in late
            self._send(rank, merge, partial(self._queue.put, sent) if is_held else None)

    def _sent(self, engine: Engine, fragment: int, since_s: float) -> None:
        """Notes that one more rank has a merge."""
        if engine is not self._engine:
            return
        self._num_receivers[fragment] -= 1
        if not self._num_receivers[fragment]:
            self.rounds.owners[fragment].sync_s = time.monotonic() - since_s
            self._release(engine, fragment)

    def _hand_on(self, engine: Engine, snapshot: Snapshot) -> None:
        """Sends a part of an anchor, and lets rounds close meanwhile."""
        if engine is not self._engine:
            return
        late = (snapshot.fragment, snapshot.rank)
        self._catching_up.add(late)
        sent = partial(self._catching_up.discard, late)
        self._send(snapshot.rank, snapshot, partial(self._queue.put, sent))
        if snapshot.fragment in self.rounds.owners:
            self._release(engine, snapshot.fragment)

    def _release(self, engine: Engine, fragment: int) -> None:
        """Lets a fragment's next round close."""
        if engine is self._engine:
            self.rounds.owners[fragment].is_sending = False
            if not self._is_drained:
                self._close_due()

    def _notice(self, engine: Engine, failure: BaseException) -> None:
        lose = partial(self._lose_ranks, engine, failure, time.monotonic())
        self._queue.put(lose)

    def _lose_ranks(
        self, engine: Engine, failure: BaseException, since_s: float
    ) -> None:
        """Goes on without lost ranks, now or after the joint call under way."""
        if engine is not self._engine:
            return
        if self._note is not None and self._num_met > self._num_calls:
            self._put_off.append(partial(self._lose_ranks, engine, failure, since_s))
            return
        assert self._survival is not None
        connect = self._survival.connect
        own = self._own()
        trains = self._note is None

        def go_on() -> Successors:
            run = go_on_without(engine, failure, connect, own, since_s, trains=trains)
            if run.is_parted:
                if self.rounds.last_owners:
                    raise failure
                self._parted_by = failure
                self._gives_up_s = time.monotonic() + engine.timeout.total_seconds()
            return run

        self._begin(go_on)
        if self._parted_by is not None:
            self._come_back()

    def _own(self) -> dict[str, Any]:
        """This rank's place before an epoch, which it announces."""
        assert self._survival is not None
        row = self.rounds.row()
        shared = self._survival.shared()
        return {"rank": self.rounds.rank, "met": self._num_met, "row": row, **shared}

    def _begin(self, connect: Callable[[], Successors]) -> None:
        """Begins the next epoch of rounds, or ends this rank's run."""
        mail = self._mail
        if mail is not None:
            mail.end()
        try:
            self._begin_epoch(connect())
        except BaseException as error:
            self._failure = error
        if mail is not None:
            in_background(mail.cut)
        self._news.set()

    def _begin_epoch(self, run: Successors) -> None:
        assert self._survival is not None
        self._engine = run.engine
        self._labels = [one["rank"] for one in run.values]
        self._open_mail(run.channel)
        self._admission = None
        self._num_receivers.clear()
        self._catching_up.clear()
        self._left.clear()
        self._held.clear()
        self._drained.clear()
        self.rounds.begin_epoch({one["rank"]: one["row"] for one in run.values})
        self._survival.on_epoch(run)
        if max(one["met"] for one in run.values) > self._num_met:
            # Another rank knows that no message is on its way. So all ranks had sent
            # their notes and answers, and this rank ends its wait, too.
            self._drained.update(self._labels)
            self._meet()
        else:
            self._notes.clear()
            if self._note is not None:
                self._announce(self._note)

    def _see(self, number: int, label: str) -> None:
        self._queue.put(partial(self._invite, number, label))

    def _invite(self, number: int, label: str) -> None:
        """Has all ranks meet a newcomer: one at a time, and not in a joint call."""
        assert self._survival is not None
        invitation = Invitation(number, self._survival.first_label + number - 1)
        if label:
            invitation = Invitation(number, int(label))
        is_busy = self._admission is not None or self._is_in_joint_call
        is_here = invitation.label in self._engine.who.numbers
        if is_busy or is_here or number in self._invited:
            return
        self._invited.add(number)
        self._send_to_others(invitation)
        self._come_together(invitation)

    @property
    def _is_in_joint_call(self) -> bool:
        return self._note is not None or bool(self.rounds.last_owners)

    def _come_together(self, invitation: Invitation) -> None:
        """Begins to meet a newcomer, beside the rounds."""
        engine = self._engine
        labels = [*engine.who.numbers, invitation.label]
        offer = Offer(invitation.number, labels, self.rounds.epoch.number)

        def meet(connect: Connect, heal: Callable[[Engine], Any]) -> Admitted | str:
            return come_together(offer, connect, heal, engine.timeout, engine)

        self._admit(meet)

    def _come_back(self) -> None:
        """Begins to ask the others to take this rank in again."""
        assert self._survival is not None
        fingerprint = json.loads(self._survival.fingerprint)
        [label] = self._engine.who.numbers
        timeout = self._engine.timeout

        def meet(connect: Connect, heal: Callable[[Engine], Any]) -> Admitted | str:
            time.sleep(_LOOK_S)
            # a new connection, as one that waits for a lost packet waits for long
            in_background(lambda: own_store(REJOINED).check(["run"])).result(PATIENCE_S)
            returning = Returning(label)
            returning.ask(fingerprint, timeout)
            returning.enter(connect, heal, timeout)
            return returning.admitted

        self._admit(meet)

    def _admit(
        self, meet: Callable[[Connect, Callable[[Engine], Any]], Admitted | str]
    ) -> None:
        """Has ``meet`` connect all ranks in the background."""
        assert self._survival is not None
        self._admission = admission = Admission()

        def heal(joined: Engine) -> dict[str, Any]:
            admission.channel = channel_of(joined)
            self._queue.put(partial(self._stand_still, admission))
            return admission.own.result()

        meeting = in_background(partial(meet, self._survival.connect, heal))
        admission.meeting = meeting
        end = partial(self._end_admission, admission)
        meeting.add_done_callback(lambda _: self._queue.put(end))

    def _stand_still(self, admission: Admission) -> None:
        """Announces this rank's place, and waits until all ranks have done so."""
        is_busy = self._parted_by is None and self._is_in_joint_call
        if admission is not self._admission or is_busy:
            busy = RankFailed("the ranks make a joint call, or have lost a rank")
            admission.own.set_exception(busy)
            return
        admission.own.set_result(self._own())
        assert admission.meeting is not None
        wait([admission.meeting])
        self._end_admission(admission)

    def _end_admission(self, admission: Admission) -> None:
        """Begins an epoch with the newcomer, unless it stays out."""
        if admission is not self._admission or admission.meeting is None:
            return
        self._admission = None
        try:
            found = admission.meeting.result()
        except Exception as error:  # no newcomer ends a run
            found = said(error)
        if isinstance(found, str):
            self._stay_out(found)
            return
        old = self._engine
        if self._parted_by is not None:
            self._parted_by = None
            self._num_met = max(one["met"] for one in found.values)
        channel = admission.channel
        engine, group, values = found
        run = Successors(engine, group, channel, values, admission.since_s)
        self._begin(lambda: run)
        in_background(old.close)

    def _stay_out(self, why: str) -> None:
        """Goes on as before; a rank that is cut off asks again, for the time-out."""
        if self._parted_by is None:
            log.warning("a new process could not join: %s", why)
        elif time.monotonic() < self._gives_up_s:
            self._come_back()
        else:
            self._failure = self._parted_by

    def _go_on(self) -> None:
        self._note = None
        self._num_calls += 1
        put_off = self._put_off
        self._put_off = []
        for event in put_off:
            self._queue.put(event)
        if not self._is_drained:
            # This rank was away when the others made the call. Notes that are here may
            # be of their next call, so they are kept.
            return
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

    def _send_to_others(self, message: RoundMessage) -> None:
        for rank in self._labels:
            if rank != self.rounds.rank:
                self._send(rank, message)

    def _lose(self, engine: Engine, error: BaseException) -> None:
        if not engine.failure:
            engine.broken("exchange rounds", error, self.rounds.step)

    def _refuse_unlike(self, notes: list[Note]) -> None:
        for name, what, remedy in _ALIKE:
            values: list[Any] = [getattr(note, name) for note in notes]
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
