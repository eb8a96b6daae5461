"""Pulse: the ranks that live find out which rank died.

When a rank dies, its peers see a closed connection or a timeout, then ranks that wait
for them see the same, and no error says where it began. Every rank therefore counts up
a number in the job's rendezvous store, once in ``PERIOD_S``; a rank whose number stands
still is gone. The first rank to find out leaves an alarm in the store, and the others,
who may be waiting on a healthy connection, hear it within a period.

Of a pulse, only its own thread talks to the store. A store whose host hangs never
answers. So other threads use the values that were read last, or wait for new ones for
some seconds at most. If the store is silent, its host (rank 0) is lost, or the link to
the host. A roll call finds out which: it connects to the probe port that each rank
listens at (`roll_call`).
"""

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ...errors import ExitCode
from ..transport.wire import in_background, own_store
from .alarm import Alarm, said
from .roll_call import RollCall
from .sweeping import leave, sweep

PERIOD_S = 0.5
PATIENCE_S = 3.0
"""Seconds for which a rank's number must stand still before the rank counts as gone. It
is six periods, as a busy machine may skip some.
"""
STORE_PATIENCE_S = 30.0
"""Seconds that the store may take to answer while nothing else is wrong, as hosts
migrate and links stall.
"""
ENDED_S = 1.5 * PERIOD_S
"""``PATIENCE_S`` for a rank whose probe port refuses connections.

Most often its process has ended. But a firewall may refuse connections too, and then
the rank's number still grows.
"""
LINGER_S = 2 * PERIOD_S
"""Seconds that an error waits after its alarm, as its process may host the store."""
_QUICK_S = 0.02
"""Seconds between the thread's first rounds, which look for the others' probe ports."""
_SLOWER = 1.02
"""The factor by which the time between these rounds grows."""
_DETACHED = -1
"""The count in the last sign of a rank that detaches."""


class Place(NamedTuple):
    """A rank's progress: its joint calls, its step, and the messages launched since.

    ``local_step`` counts steps that a rank makes by itself. Comparisons of ranks'
    progress leave it out.
    """

    num_calls: int
    step: int
    launched: int
    local_step: int = 0


class Sign(NamedTuple):
    """A rank's sign of life.

    ``beat`` is the number that it counts up, and ``place`` its progress. It ``waits``
    if its messages wait for the network. ``still_s`` are the seconds for which the
    number has stood still, as `Stillness` counts them.
    """

    beat: int
    place: Place
    waits: bool = False
    still_s: float = 0.0


_NO_SIGN = "[0, false, 0, 0, 0]"
"""The sign of a rank that has shown none yet."""


def _sign(value: str | bytes) -> Sign:
    """A sign as ``Pulse._show`` has written it."""
    beat, waits, *place = json.loads(value)
    return Sign(beat, Place(*place), waits)


class Stillness:
    """Measures for how long a number has stood still, by this process's readings of it.

    A slow store is no sign of a dead rank: while the store does not answer, no number
    is seen to change. So the time between two readings counts as ``PERIOD_S`` at most.
    """

    def __init__(self) -> None:
        self._number = -1
        self._read_s = 0.0
        self._still_s = 0.0

    def read(self, number: int) -> float:
        """Notes a reading; returns the seconds for which the number has stood still."""
        now_s = time.monotonic()
        if number == self._number:
            self._still_s += min(now_s - self._read_s, PERIOD_S)
        else:
            self._still_s = 0.0
        self._number = number
        self._read_s = now_s
        return self._still_s


ALARM = "alarm"
"""The store's key of the first alarm, which ends an epoch."""


class Pulse:
    """Counts for this rank, watches for an alarm, and finds silent ranks.

    Args:
        name: The name of the ranks' membership.
        rank: This rank.
        world: The number of ranks.
        on_alarm: Called once if another rank raised an alarm, in another thread.
        on_lost: Called once if the store is lost, in the pulse's thread.
        on_error: Called if the pulse's thread ends by an error, which other ranks hear.
        waits: Whether a message that this rank has launched waits for the network.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world: int,
        on_alarm: Callable[[Alarm], None],
        on_lost: Callable[[], None],
        on_error: Callable[[BaseException], None],
        waits: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rank = rank
        self.place = Place(0, 0, 0)
        """The progress that this rank shows the others."""
        self.waits = waits
        self.peers: Sequence[int] = range(world)
        """The ranks whose progress compares with this one's."""
        self.detaches = False
        """Whether the rank is about to leave by itself; its last sign says so."""
        self.lingers = True
        """Whether an alarm may end this process, which may host the store.

        Then it leaves the others time to read the alarm.
        """
        self.store_is_lost = False
        self.is_cut_off = False
        """Whether the network parts this rank from the store.

        Ranks on the store's side then decide who goes on.
        """
        self._name = name
        self._store: Any = None
        self._world = world
        self._on_alarm = on_alarm
        self._on_lost = on_lost
        self._on_error = on_error
        self._beat = 0
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._outgoing: Alarm | None = None
        """This rank's own alarm."""
        self._sent = threading.Event()
        """Set once the store has the alarm of this rank, or an earlier one."""
        self._first: Alarm | None = None
        """The alarm that counts, once this rank knows it."""
        self._is_announced = False
        """Whether ``on_alarm`` was called."""
        self._answered_s = time.monotonic()
        """When the store answered last."""
        self._broke_s = math.inf
        """When the connection to the store broke."""
        self._old: list[str] = []
        """Prefixes of keys in the store that are to be deleted."""
        self._news = threading.Condition()
        """Held while signs are read or written; notified when they were read."""
        self._num_watching = 0
        """The number of callers that wait for others' signs."""
        self._num_reads = 0
        self._signs: list[Sign] = []
        self._beats = [Stillness() for _ in range(world)]
        self.roll_call = RollCall(rank, world, self._heard, self._known)
        self._thread = threading.Thread(
            target=self._run, name="gradwire pulse", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        with self._news:
            self._news.notify_all()  # nothing is read any more
        self.roll_call.close()
        # a thread that waits for a silent store does not end
        if threading.current_thread() is not self._thread and self.mute_s < PATIENCE_S:
            self._thread.join(PATIENCE_S)
            self.roll_call.close()  # if the thread has opened the port meanwhile
        if not self._thread.is_alive():
            self._store = None  # Gives the connection back.

    # Alarms.

    def raise_alarm(self, alarm: Alarm, *, lingers: bool = True) -> Alarm:
        """Announces an alarm to all ranks.

        If this process ``lingers``, the call returns once they have had time to hear
        it. Returns the alarm that counts: the first one, as it caused the later ones.
        """
        self._outgoing = alarm
        self._wake.set()
        if not self._sent.wait(PERIOD_S) or not lingers:
            # ranks whose probe ports can be reached need not wait for the store
            in_background(partial(self.roll_call.announce, self._known()))
        if self._sent.wait(LINGER_S - PERIOD_S) and lingers:
            time.sleep(LINGER_S)
        return self._first or alarm

    def _known(self) -> str:
        """The alarm that this rank knows of, encoded; empty if there is none."""
        alarm = self._first or self._outgoing
        return "" if alarm is None else alarm.encoded()

    def _heard(self, line: bytes) -> None:
        """Takes an alarm that another rank sends to the probe port."""
        if self._first is None:
            self._first = Alarm.decoded(line, self.place.step)
            self._is_announced = True
            self._on_alarm(self._first)

    # Signs of other ranks.

    @property
    def mute_s(self) -> float:
        """Seconds since the store's last answer, counted until its connection broke."""
        return min(time.monotonic(), self._broke_s) - self._answered_s

    @contextlib.contextmanager
    def _watching(self) -> Iterator[bool]:
        """A block in which the thread reads signs again and again.

        The block gets whether they have just been read.
        """
        with self._news:
            self._num_watching += 1
            self._wake.set()
            yield self._is_read_anew()
            self._num_watching -= 1

    def _is_read_anew(self) -> bool:
        """Whether signs are read within ``PATIENCE_S``; the caller holds ``_news``."""
        reads = self._num_reads
        self._news.wait_for(
            lambda: (
                self.store_is_lost or self._stop.is_set() or self._num_reads > reads
            ),
            PATIENCE_S,
        )
        return not self.store_is_lost and self._num_reads > reads

    def silent_ranks(self) -> tuple[tuple[int, ...], bool]:
        """Ranks that are gone, and whether the store is silent.

        If the store is silent, these are rank 0, which hosts it. The last sign of a
        rank may be read only after its end. So a rank lives if its number grows twice.
        """
        still = {*range(self._world)} - {self.rank}
        with self._watching() as is_read:
            first = [sign.beat for sign in self._signs]
            while is_read and not all(map(self.is_gone, still)):
                is_read = self._is_read_anew()
                still = {r for r in still if self._signs[r].beat < first[r] + 2}
        return (tuple(sorted(still)), False) if is_read else ((0,), True)

    def still_s(self, rank: int) -> float:
        """Seconds for which a rank's sign had stood still when signs were last read.

        From the first call on they are read again and again.
        """
        self._num_watching = self._num_watching or 1
        return self._signs[rank].still_s if self._signs else 0.0

    def is_gone(self, rank: int) -> bool:
        """Whether a rank was gone when signs were last read."""
        has_ended = rank in self.roll_call.ended
        patience_s = ENDED_S if has_ended else PATIENCE_S
        return self._signs[rank].still_s >= patience_s

    def signs(self) -> list[Sign]:
        """The peers' signs, read anew; empty if the store does not answer."""
        with self._watching() as is_read:
            return [self._signs[rank] for rank in self.peers] if is_read else []

    def detached(self) -> set[int]:
        """The ranks that had left by themselves when signs were last read."""
        signs = enumerate(self._signs)
        return {rank for rank, sign in signs if sign.beat == _DETACHED}

    def last_ranks(self) -> tuple[int, ...]:
        """The peers with the least progress when signs were last read.

        Ranks that waited for the network then are left out. If all ranks have the same
        progress, there are none. All other ranks have launched the messages that these
        ranks need, so the others were not late.
        """
        signs = self._signs
        places = {r: signs[r].place._replace(local_step=0) for r in self.peers}
        first = max(places.values())
        last = min(places.values())
        return tuple(
            rank
            for rank, place in places.items()
            if last == place < first and not signs[rank].waits
        )

    def local_steps(self) -> str:
        """A text of every rank's local steps when last read; empty if all agree.

        A rank whose data have ended makes fewer steps, and the other ranks wait for it.
        """
        counts = [sign.place.local_step for sign in self._signs]
        if len({*counts}) < 2:
            return ""
        words = [f"rank {rank} after {count}" for rank, count in enumerate(counts)]
        return f" (local steps when last seen: {', '.join(words)})"

    # The thread.

    def sweep(self, part: str) -> None:
        """Has the keys under ``part``, which all have read, deleted from the store."""
        self._old.append(part)
        self._wake.set()

    def _run(self) -> None:
        # Probe ports are looked for at once: a link or the store may fail in the first
        # step.
        quick_s = _QUICK_S
        try:
            while not self._stop.is_set() and self._live():
                wait_s = quick_s = min(_SLOWER * quick_s, PERIOD_S / 4)
                if self.roll_call.is_complete:
                    wait_s = PERIOD_S / 4 if self._num_watching else PERIOD_S
                self._wake.wait(wait_s)
                self._wake.clear()
            if self._store is not None and not self.store_is_lost:
                # the store's host may have ended already
                with contextlib.suppress(dist.DistError):
                    # Ranks may wait for this one, and their errors show its progress.
                    self._beat = _DETACHED if self.detaches else self._beat + 1
                    self._show()
                    leave(self._store, self._world)
        except BaseException as error:
            text = (
                f"the pulse of rank {self.rank} of {self._world} ended by {said(error)}"
            )
            with contextlib.suppress(Exception):
                alarm = Alarm((self.rank,), self.place.step, text, ExitCode.BROKEN)
                self._store.compare_set(ALARM, "", alarm.encoded())
                self._stop.wait(LINGER_S)
            self._on_error(error)

    def _live(self) -> bool:
        """One round with the store; returns whether it still answers."""
        try:
            if self._store is None:
                self._store = own_store(self._name)
                self._store.set_timeout(timedelta(seconds=STORE_PATIENCE_S))
            self._exchange()
            self._answered_s = time.monotonic()
        except dist.DistError:
            self._broke_s = time.monotonic()
            with self._news:
                self.store_is_lost = True
                self._news.notify_all()
        if self._outgoing is None and not self._is_announced:
            if self._first is not None:
                # This process may host the store, and may end in ``on_alarm``. So all
                # ranks get time to read the alarm before.
                if self.lingers:
                    self._stop.wait(LINGER_S)
                self._is_announced = True
                self._on_alarm(self._first)
            # A finished job ends rank by rank, and the store with one of them. So the
            # store counts as lost only if this rank still runs some seconds later.
            elif self.store_is_lost and not self._stop.wait(PATIENCE_S):
                self._on_lost()
        return not self.store_is_lost

    def _exchange(self) -> None:
        """Writes this rank's sign and alarm to the store, and reads the others'."""
        self._beat += 1
        self._show()
        if not self.roll_call.is_complete:
            self.roll_call.meet(self._store)
            if self.roll_call.is_complete and self.rank == 0:
                self.sweep("way")  # all have read these, as all have opened their ports
        if self._outgoing and not (self._sent.is_set() or self.is_cut_off):
            line = self._store.compare_set(ALARM, "", self._outgoing.encoded())
            self._first = self._first or Alarm.decoded(line, self.place.step)
            self._sent.set()
        elif self._first is None and self._store.check([ALARM]):
            self._first = Alarm.decoded(self._store.get(ALARM), self.place.step)
        while self._old:
            sweep(PrefixStore(self._old.pop(), self._store))
        if self._num_watching:
            self._note(self._read())

    def _show(self) -> None:
        """Writes this rank's sign to the store."""
        sign = [self._beat, self.waits(), *self.place]
        self._store.set(f"pulse/{self.rank}", json.dumps(sign))

    def _read(self) -> list[Sign]:
        """Every rank's sign. All are asked for at once, as the store may be far."""
        store = self._store
        keys = [f"pulse/{rank}" for rank in range(self._world)]
        # a rank shows its sign before its probe port
        if self.roll_call.is_complete:
            return [*map(_sign, store.multi_get(keys))]
        values = [store.get(key) if store.check([key]) else _NO_SIGN for key in keys]
        return [*map(_sign, values)]

    def _note(self, signs: Sequence[Sign]) -> None:
        """Gives signs that were just read to the threads that wait for them."""
        pairs = zip(self._beats, signs, strict=True)
        read = [sign._replace(still_s=beat.read(sign.beat)) for beat, sign in pairs]
        with self._news:
            self._signs = read
            self._num_reads += 1
            self._news.notify_all()
