"""Pulse: which rank died, told by the ranks that live.

When a rank dies, its peers see a closed connection or a timeout, then those that wait for them see
the same, and no error says where it began. Every rank therefore counts up a number in the job's
rendezvous store, once in ``PERIOD_S``; a rank whose number stands still is gone. The first rank to
find out leaves an alarm in the store, and the others, who may be waiting on a healthy connection,
hear it within a period.

Only the pulse's own thread talks to the store. A store whose host hangs never answers, so no other
thread may wait for it: they look at what was read last, and a store that is silent itself tells
that its host, rank 0, is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from torch._C._distributed_c10d import PrefixStore

from .wire import default_store

PERIOD_S = 0.5
PATIENCE_S = 3.0
"""How long a number must stand still. Six periods: a busy machine may skip some."""
STORE_PATIENCE_S = 30.0
"""How long the store may take to answer while nothing else is wrong: hosts migrate, links stall."""
LINGER_S = 2 * PERIOD_S
"""How long an error waits after its alarm. The process that it ends may be the store's host."""


class Alarm(NamedTuple):
    """What happened: the ranks (of the group) it began at, the step, and a sentence."""

    ranks: tuple[int, ...]
    step: int
    text: str

    def encoded(self) -> str:
        return f"{','.join(map(str, self.ranks))};{self.step};{self.text}"

    @classmethod
    def decoded(cls, line: str) -> Alarm:
        ranks, step, text = line.split(";", 2)
        return cls(tuple(int(r) for r in ranks.split(",") if r), int(step), text)


class Place(NamedTuple):
    """How far a rank is: its step, the messages launched in it, and how often it began to load."""

    step: int
    launched: int
    num_loads: int


class Sign(NamedTuple):
    """A rank's sign of life: its count, and how far it is."""

    beat: int
    place: Place


class Pulse:
    """Counts for this rank, watches the alarm, and can tell who is silent.

    ``on_alarm`` is called once, from the pulse's thread, when another rank raised an alarm or the
    store is lost. ``place`` is what this rank shows of its progress.
    """

    def __init__(self, name: str, rank: int, world: int, on_alarm: Callable[[Alarm], None]) -> None:
        self._name = name
        self._store: Any = None
        self._rank, self._world, self._on_alarm = rank, world, on_alarm
        self.place = Place(0, 0, 0)
        self._beat = 0
        self._stop, self._wake, self._sent = (threading.Event() for _ in range(3))
        self._news = threading.Condition()
        self._watching = self._lost = self._silent = False
        self._outgoing: Alarm | None = None
        self._signs: list[Sign] = []
        self._num_reads = 0
        self._thread = threading.Thread(target=self._run, name="gradwire pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(PATIENCE_S)
        if not self._thread.is_alive():
            self._store = None  # Gives the connection back.

    def raise_alarm(self, alarm: Alarm) -> None:
        """Tells all other ranks, if the store lives, and gives them the time to hear it."""
        self._outgoing = alarm
        self._wake.set()
        if self._sent.wait(LINGER_S):
            time.sleep(LINGER_S)

    def silent_ranks(self) -> tuple[int, ...]:
        """Ranks whose number stood still for ``PATIENCE_S``; rank 0 if the store is silent."""
        deadline = time.monotonic() + PATIENCE_S
        silent = set(range(self._world)) - {self._rank}
        before: list[Sign] = []
        with self._news:
            self._watching, reads = True, self._num_reads
            self._wake.set()
            while silent and not self._lost and (left_s := deadline - time.monotonic()) > 0:
                self._news.wait(left_s)
                if self._num_reads > reads:
                    before = before or self._signs
                    silent = {r for r in silent if self._signs[r].beat == before[r].beat}
            self._watching = False
            if self._lost or self._num_reads < reads + 2:
                return (0,)
        return tuple(sorted(silent))

    def signs(self) -> list[Sign]:
        """Every rank's sign, read anew; empty if the store does not answer."""
        with self._news:
            self._watching, reads = True, self._num_reads
            self._wake.set()
            self._news.wait_for(lambda: self._lost or self._num_reads > reads, PATIENCE_S)
            self._watching = False
            return self._signs if self._num_reads > reads else []

    def last_ranks(self) -> tuple[int, ...]:
        """Ranks that are further back in their steps than others, as read last; none if level."""
        with self._news:
            places = [sign.place for sign in self._signs]
        if not places or min(places) == max(places):
            return ()
        return tuple(r for r, place in enumerate(places) if place == min(places))

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self._store is None:
                    self._store = self._connected()
                self._turn()
            except RuntimeError:
                self._give_up()
                return
            self._wake.wait(PERIOD_S / 2 if self._watching else PERIOD_S)
            self._wake.clear()

    def _connected(self) -> Any:
        # A clone has a connection of its own: a blocked call elsewhere does not stop the pulse.
        store = PrefixStore(f"gradwire/{self._name}", default_store().clone())
        store.set_timeout(timedelta(seconds=STORE_PATIENCE_S))
        return store

    def _turn(self) -> None:
        """One round with the store: own sign out, alarms out and in, others' signs in."""
        self._beat += 1
        sign = ";".join(map(str, (self._beat, *self.place)))
        self._store.set(f"pulse/{self._rank}", sign)
        if self._outgoing is not None and not self._sent.is_set():
            # The first alarm stays: later ones are its consequences.
            self._store.compare_set("alarm", "", self._outgoing.encoded())
            self._silent = True
            self._sent.set()
        if not self._silent and self._store.check(["alarm"]):
            self._silent = True
            self._stop.wait(LINGER_S)
            self._on_alarm(Alarm.decoded(self._store.get("alarm").decode()))
        if self._watching:
            signs = [self._read(rank) for rank in range(self._world)]
            with self._news:
                self._signs, self._num_reads = signs, self._num_reads + 1
                self._news.notify_all()

    def _read(self, rank: int) -> Sign:
        key = f"pulse/{rank}"
        if not self._store.check([key]):
            return Sign(0, Place(0, 0, 0))
        beat, *place = map(int, self._store.get(key).decode().split(";"))
        return Sign(beat, Place(*place))

    def _give_up(self) -> None:
        """The store is gone: nobody can be told, so every rank that still needs it finds out."""
        with self._news:
            self._lost = True
            self._news.notify_all()
        # A job that is over ends rank by rank; only who is still waiting afterwards has lost it.
        if not self._silent and not self._stop.wait(PATIENCE_S):
            text = f"rank 0 of {self._world}, which holds the job's store, stopped answering"
            self._on_alarm(Alarm((0,), self.place.step, text))
