"""The pulse: every rank that falls silent is found, whichever it is, and by each of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
import torch.distributed as dist

from gradwire.contract.verbs import Compute, Steps
from gradwire.errors import ExitCode
from gradwire.runtime.failure import blame, pulse
from gradwire.runtime.failure.blame import silence
from gradwire.runtime.failure.membership import ALONE
from gradwire.runtime.failure.pulse import Alarm, Place, Pulse, Sign, Stillness
from gradwire.runtime.failure.roll_call import Reach
from gradwire.runtime.step import wire
from gradwire.runtime.step.engine import Engine
from gradwire.runtime.step.task_graph import Task

WORLD = 3
_names = count()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pulse]]:
    """Three ranks that share a store which outlives them all."""
    monkeypatch.setattr(pulse, "PERIOD_S", 0.05)
    monkeypatch.setattr(pulse, "PATIENCE_S", 1.0)
    monkeypatch.setattr(pulse, "LINGER_S", 0.1)
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), False)
    monkeypatch.setattr(wire, "_given", [store])
    name = f"{wire.REJOINED}{next(_names)}"
    with ExitStack() as stack:
        found = []
        for rank in range(WORLD):
            own = Pulse(name, rank, WORLD, lambda alarm: None, lambda: None, lambda error: None)
            stack.callback(own.stop)
            found.append(own)
        yield found


def test_while_all_live_nobody_is_silent(ranks: list[Pulse]) -> None:
    assert [one.silent_ranks() for one in ranks] == [((), False)] * WORLD


@pytest.mark.parametrize("lost", range(WORLD))
def test_whoever_falls_silent_is_found_by_all_others(ranks: list[Pulse], lost: int) -> None:
    assert all(len(one.signs()) == WORLD for one in ranks)
    ranks[lost].stop()
    others = [one for one in ranks if one.rank != lost]
    with ThreadPoolExecutor() as pool:
        assert [*pool.map(Pulse.silent_ranks, others)] == [((lost,), False)] * len(others)


BEFORE = Place(step=2, launched=4, num_calls=0)
IN_CALL = Place(step=2, launched=0, num_calls=1)
NEXT = Place(step=3, launched=1, num_calls=0)


@pytest.mark.parametrize(
    ("places", "waiting", "late"),
    [
        ((NEXT, BEFORE, NEXT), (0, 2), (1,)),
        ((NEXT, BEFORE, BEFORE), (0,), (1, 2)),
        ((NEXT, BEFORE, BEFORE), (0, 1), (2,)),
        ((NEXT, BEFORE, BEFORE), (0, 1, 2), ()),
        ((IN_CALL, BEFORE, IN_CALL), (), (1,)),
        ((IN_CALL, BEFORE, IN_CALL), (1,), ()),
        ((NEXT, NEXT, NEXT), (), ()),
    ],
)
def test_who_is_behind_is_late_unless_it_waits_for_the_network(
    ranks: list[Pulse], places: tuple[Place, ...], waiting: tuple[int, ...], late: tuple[int, ...]
) -> None:
    for one in ranks:
        one.place = places[one.rank]
        one.waits = lambda rank=one.rank: rank in waiting  # type: ignore[misc]
    told = [(place, rank in waiting) for rank, place in enumerate(places)]
    end_s = time.monotonic() + 20  # each look is at what was read anew
    while [sign[1:3] for sign in ranks[0].signs()] != told:
        assert time.monotonic() < end_s
    assert ranks[0].last_ranks() == late


def test_an_engine_waits_while_messages_are_under_way_and_it_computes_nothing() -> None:
    engine = Engine(ALONE, num_channels=1, timeout=timedelta(seconds=20), on_span=lambda span: None)
    begun, go = threading.Event(), threading.Event()

    def encode() -> None:
        begun.set()
        go.wait(20)

    def text() -> Steps[None]:
        yield Compute("encode", encode, 1)

    assert not engine._waits()
    before = Task("before", lambda: None)
    end = engine.launch(0, "message 0", text(), behind=[before])
    assert engine._waits()
    engine.begin(before)
    assert begun.wait(20)
    assert not engine._waits()
    go.set()
    engine.wait([end])
    assert not engine._waits()
    engine.close()


# ---- A store that answers late is not taken for ranks that are dead ------------------------------


HERE, ENDED, MUTE, CUT = Reach.ANSWERS, Reach.ENDED, Reach.MUTE, Reach.CUT


class Scripted(Pulse):
    """A pulse of rank 1 of 3 that reads these beats, each after a pause."""

    script: tuple[tuple[float, tuple[int, int, int]], ...] = ()

    def _run(self) -> None:
        for pause_s, beats in self.script:
            time.sleep(pause_s)
            self._note([Sign(beat, Place(0, 0, 0)) for beat in beats])


def read(monkeypatch: pytest.MonkeyPatch, *script: Any) -> tuple[tuple[int, ...], bool]:
    monkeypatch.setattr(pulse, "PATIENCE_S", 0.3)
    monkeypatch.setattr(pulse, "PERIOD_S", 0.05)
    monkeypatch.setattr(Scripted, "script", script)
    one = Scripted("test", 1, 3, lambda alarm: None, lambda: None, lambda error: None)
    return one.silent_ranks()


def test_what_a_store_does_not_tell_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    first, late = [(0.05, (7, 1, 7)), (0.02, (7, 2, 7))], (0.25, (7, 3, 7))
    assert read(monkeypatch, *first, late, (0.05, (8, 4, 8))) == ((), False)
    steady = [(0.04, (n, n, 7)) for n in range(12)]
    assert read(monkeypatch, *steady) == ((2,), False)
    for script in ([], first):  # no answer for as long as patience lasts
        assert read(monkeypatch, *script) == ((0,), True)


def test_local_steps_are_told_where_they_differ() -> None:
    one = Scripted("test", 1, 3, lambda alarm: None, lambda: None, lambda error: None)
    for counts, said in (
        ((4, 4, 4), ""),
        (
            (4, 7, 4),
            " (local steps when last seen: rank 0 after 4, rank 1 after 7, rank 2 after 4)",
        ),
    ):
        one._note([Sign(1, Place(0, 2, 1, count)) for count in counts])
        assert one.local_steps() == said
        assert one.last_ranks() == ()  # they take no part in the order of ranks


def test_a_number_stands_still_only_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.2, 30.0, 30.3, 30.4, 50.0])
    monkeypatch.setattr(pulse.time, "monotonic", lambda: next(now))
    one = Stillness()
    found = [one.read(number) for number in (4, 4, 4, 4, 5, 5)]
    assert found == pytest.approx([0, 0.2, 0.7, 1.0, 0, 0.5])


class Silent:
    """A pulse of rank 1 of 3 whose store answers at the given look, if at all."""

    rank, store_is_lost = 1, False

    def __init__(self, reach: list[dict[int, Reach]], answers: int, mute_s: float = 9.0) -> None:
        self.mute_s = mute_s
        self._reach, self._answers, self.looks = reach, answers, 0
        self.roll_call, self._lock = self, threading.Lock()

    def ask(self) -> tuple[dict[int, Reach], bytes]:
        with self._lock:
            return self._reach[min(self.looks, len(self._reach) - 1)], b""

    def local_steps(self) -> str:
        return ""

    def silent_ranks(self) -> tuple[tuple[int, ...], bool]:
        time.sleep(0.05)  # for who asks at the doors
        with self._lock:
            self.looks += 1
            is_silent = self.looks < self._answers
        return ((0,) if is_silent else ()), is_silent


@pytest.mark.parametrize(
    ("reach", "answers", "looks", "found"),
    [
        ([{0: HERE, 2: HERE}], 3, 3, None),
        ([{0: HERE, 2: MUTE}], 3, 3, None),
        ([{0: HERE, 2: ENDED}], 99, 1, ((2,), ExitCode.RANK_LOST)),
        ([{0: HERE, 2: HERE}, {0: HERE, 2: ENDED}], 99, 2, ((2,), ExitCode.RANK_LOST)),
        ([{0: HERE, 2: CUT}], 99, 1, ((2,), ExitCode.NETWORK)),
        ([{0: ENDED, 2: HERE}], 99, 1, ((0,), ExitCode.RANK_LOST)),
        ([{0: MUTE, 2: HERE}], 99, 1, ((0,), ExitCode.RANK_LOST)),
        ([{0: HERE, 2: HERE}], 99, 3, ((), ExitCode.UNAVAILABLE)),
    ],
)
def test_who_is_known_to_be_dead_is_named_while_the_store_is_slow(
    reach: Any, answers: int, looks: int, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blame, "STORE_PATIENCE_S", 0.13 if looks == 3 and found else 60.0)
    one: Any = Silent(reach, answers)
    alarm = silence(one, 7, 3)
    told = None if alarm is None else (alarm.ranks, alarm.code)
    assert (told, one.looks) == (found, looks)
    assert alarm is None or isinstance(alarm, Alarm)


@pytest.mark.parametrize(("mute_s", "ranks"), [(9.0, (1,)), (0.5, (0,))])
def test_a_rank_that_was_cut_off_until_all_others_had_ended_names_itself(
    mute_s: float, ranks: tuple[int, ...]
) -> None:
    """Where the store answered until its host ended, it is the host that is lost."""
    one: Any = Silent([{0: ENDED, 2: ENDED}], 99, mute_s)
    alarm = silence(one, 7, 3)
    assert alarm is not None
    assert alarm.ranks == ranks
