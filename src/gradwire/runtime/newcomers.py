"""Newcomers: a process asks to be a rank of a run that goes on, and all decide on it as one.

They meet in the job's store, below ``gradwire/rejoin``. ``run`` is the fingerprint of the run, with
which a newcomer compares its own. ``asked`` counts those that have asked: newcomer n is the n-th.
``n/beat`` counts up while it lives. ``n/offer`` is its place, from rank 0. A rank that is connected
writes ``n/ok/rank``. ``n/verdict`` is written once, and all obey it: whoever finds that all are
connected writes "go", whoever has a reason against it writes that.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ..errors import ExitCode, RankFailed, RanksDiffer
from .fingerprint import Fingerprint, difference
from .membership import Membership
from .pulse import PATIENCE_S, PERIOD_S, Alarm, said
from .wire import REJOINED, in_background, root_store

GO = "go"
_POLL_S = 0.02
_BEAT_S = PERIOD_S / 2
_SPARE = timedelta(seconds=10)
"""The time beyond a time-out in which the store must have answered."""


def meeting_place() -> Any:
    """The part of the job's store where newcomers are met, over a connection of its own."""
    return PrefixStore("gradwire/rejoin", root_store().clone())


def bounded(question: Callable[[Any], Any], timeout: timedelta) -> Any:
    """The answer of the meeting place to a question that itself takes ``timeout`` at most.

    Raises ``RankFailed`` where the store does not answer.
    """
    asked = in_background(lambda: question(meeting_place()))
    try:
        return asked.result((timeout + _SPARE).total_seconds())
    except (dist.DistError, TimeoutError) as error:
        raise RankFailed(
            "the job's store, where ranks meet a newcomer, is lost or gave no answer within "
            f"{timeout}; start the job again from its last checkpoint",
            exit_code=ExitCode.UNAVAILABLE,
        ) from error


class Door:
    """Rank 0's look-out for newcomers, on a thread of its own: no step waits for it.

    ``number`` is that of the newcomer that has waited longest; 0 where none waits and lives.
    """

    def __init__(self, fingerprint: str) -> None:
        self.number = 0
        self._fingerprint = fingerprint
        self._stop = threading.Event()
        threading.Thread(target=self._watch, name="gradwire door", daemon=True).start()

    def close(self) -> None:
        """Lets nobody in any more."""
        self._stop.set()

    def _watch(self) -> None:
        with suppress(dist.DistError):  # the pulse says that the store is lost
            store, beats = meeting_place(), dict[int, int]()
            store.set("run", self._fingerprint)
            while not self._stop.wait(PERIOD_S):
                now = {
                    number: store.add(f"{number}/beat", 0)
                    for number in range(1, store.add("asked", 0) + 1)
                    if not store.check([f"{number}/verdict"])
                }
                alive = [number for number in now if now[number] > beats.get(number, now[number])]
                self.number, beats = min(alive, default=0), now
            store.delete_key("run")


class Offer(NamedTuple):
    """A newcomer's place: it is the last of ``labels``, and begins with ``step``.

    ``labels`` are the numbers by which the ranks of the run are named.
    """

    number: int
    labels: list[int]
    step: int

    @property
    def who(self) -> Membership:
        """The newcomer among the others."""
        return membership(self.number, len(self.labels) - 1, len(self.labels))


def membership(number: int, rank: int, world: int) -> Membership:
    """A rank among those that newcomer ``number`` joins, which is the last."""
    return Membership(f"{REJOINED}{number}", rank, world)


class Asking:
    """A newcomer's request, which lives until ``end``."""

    def __init__(self, own: Fingerprint, timeout: timedelta) -> None:
        self._over = threading.Event()
        self.number: int = bounded(lambda store: self._asked(store, own, timeout), timeout)
        in_background(self._beat)

    def end(self) -> None:
        """Shows no sign of life any more."""
        self._over.set()

    def offer(self, timeout: timedelta) -> Offer:
        """The place that rank 0 offers; raises ``RankFailed`` if none comes in time."""
        found: str = bounded(lambda store: self._offered(store, timeout), timeout)
        return Offer(self.number, *json.loads(found))

    def _asked(self, store: Any, own: Fingerprint, timeout: timedelta) -> int:
        until_s = time.monotonic() + timeout.total_seconds()
        while not store.check(["run"]):
            if time.monotonic() > until_s:
                raise RankFailed(
                    f"no run that can be joined has shown itself in this store within {timeout}; "
                    "pass the store of a job whose ranks have attached with on_failure='shrink'"
                )
            time.sleep(_POLL_S)
        found = json.loads(store.get("run"))
        if differs := difference(found, json.loads(json.dumps(own))):
            raise RanksDiffer(
                f"the run and this newcomer do not train the same thing: {differs}; start it with "
                "the run's model, settings and versions"
            )
        number: int = store.add("asked", 1)
        return number

    def _offered(self, store: Any, timeout: timedelta) -> str:
        until_s = time.monotonic() + timeout.total_seconds()
        keys = [f"{self.number}/{word}" for word in ("offer", "verdict")]
        while not store.check(keys[:1]):
            if time.monotonic() > until_s:
                store.compare_set(keys[1], "", "the newcomer would wait no longer")
            if store.check(keys[1:]):
                raise refused(store.get(keys[1]).decode())
            time.sleep(_POLL_S)
        return str(store.get(keys[0]).decode())

    def _beat(self) -> None:
        with suppress(dist.DistError):
            store = meeting_place()
            while not self._over.wait(_BEAT_S):
                store.add(f"{self.number}/beat", 1)


def refused(verdict: str) -> RankFailed:
    """The error of a newcomer that stays out."""
    return RankFailed(
        f"this process did not come in: {verdict}; the others go on without it: start it again"
    )


def show_offer(offer: Offer, timeout: timedelta) -> None:
    """Tells all the place of a newcomer; called by rank 0."""
    text = json.dumps([offer.labels, offer.step])
    bounded(lambda store: store.set(f"{offer.number}/offer", text), timeout)


def await_offer(number: int, check: Callable[[], None], timeout: timedelta) -> None:
    """Waits until rank 0 has offered a place; raises as ``check`` does, or where it offers none."""

    def ask(store: Any) -> None:
        until_s = time.monotonic() + timeout.total_seconds()
        while not store.check([f"{number}/offer"]):
            check()
            if time.monotonic() > until_s or store.check([f"{number}/verdict"]):
                raise RankFailed("rank 0 has offered no place")
            time.sleep(_POLL_S)

    bounded(ask, timeout)


def agreed(
    who: Membership, number: int, work: Future[Any], check: Callable[[], None], timeout: timedelta
) -> str:
    """The verdict on newcomer ``number``, the same on all ranks: ``GO``, or why it stays out.

    This rank is ready once ``work`` has ended. ``check`` raises where its present world has failed.
    """
    text: str = bounded(
        lambda store: _Verdict(store, who, number, work).reached(check, timeout), timeout
    )
    return text


class _Verdict:
    """One rank's part in the verdict on a newcomer."""

    def __init__(self, store: Any, who: Membership, number: int, work: Future[Any]) -> None:
        self._store, self._who, self._number, self._work = store, who, number, work
        self._seen = -1, time.monotonic()

    def reached(self, check: Callable[[], None], timeout: timedelta) -> str:
        store, is_ready = self._store, False
        verdict, start_s = f"{self._number}/verdict", time.monotonic()
        oks = [f"{self._number}/ok/{rank}" for rank in range(self._who.world)]
        while not store.check([verdict]):
            if not is_ready and self._work.done() and self._work.exception() is None:
                store.set(oks[self._who.rank], "")
                is_ready = True
            reason = GO if is_ready and store.check(oks) else self._objection(check)
            if not reason and time.monotonic() - start_s > timeout.total_seconds():
                late = [rank for rank, key in enumerate(oks) if not store.check([key])]
                reason = f"ranks {late} were not ready within {timeout}"
            if reason:
                store.compare_set(verdict, "", reason)
            time.sleep(_POLL_S)
        found: str = store.get(verdict).decode()
        if found != GO:  # whoever still connects hears it by the pulse
            last = self._who.world - 1
            alarm = PrefixStore(f"gradwire/{self._who.name}", root_store().clone())
            alarm.compare_set("alarm", "", Alarm((last,), -1, "called off").encoded())
        return found

    def _objection(self, check: Callable[[], None]) -> str:
        """A reason against the newcomer that this rank knows of; empty without one."""
        if self._work.done() and (error := self._work.exception()) is not None:
            return f"rank {self._who.rank} of {self._who.world} cannot: {said(error)}"
        try:
            check()
        except RankFailed as failure:
            return f"the run has lost ranks {list(failure.ranks)} meanwhile"
        beat, now_s = self._store.add(f"{self._number}/beat", 0), time.monotonic()
        if beat != self._seen[0]:
            self._seen = beat, now_s
        return "the newcomer shows no sign of life" if now_s - self._seen[1] > PATIENCE_S else ""
