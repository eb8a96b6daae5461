"""The pulse: every rank that falls silent is found, whichever it is, and by each of the
others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from gradwire.contract.verbs import Compute, Steps
from gradwire.errors import ExitCode
from gradwire.runtime.engine.engine import Engine, Launch
from gradwire.runtime.liveness import blame, pulse
from gradwire.runtime.liveness.alarm import Alarm
from gradwire.runtime.liveness.blame import silence
from gradwire.runtime.liveness.membership import ALONE
from gradwire.runtime.liveness.pulse import Place, Pulse, Sign, Stillness
from gradwire.runtime.liveness.roll_call import Reach
from gradwire.runtime.transport import wire
from gradwire.runtime.transport.task_graph import Task
from tests.each import each

WORLD = 3
HANG_S = 60.0
"""Seconds after which a wait of these tests counts as one that never ends."""
LANE_NUMEL = 2**20
"""Elements whose computation has a lane of its own."""
READINGS = 80
"""Readings for which a number stands still until its rank counts as silent."""
_names = count()


class CountedStillness(Stillness):
    """Counts readings in place of seconds, so that a busy machine makes nobody
    silent.
    """

    _num_still = 0

    def read(self, number: int) -> float:
        self._num_still = self._num_still + 1 if super().read(number) else 0
        return pulse.PATIENCE_S * self._num_still / READINGS


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pulse]]:
    """Three ranks that share a store which outlives them all."""
    monkeypatch.setattr(pulse, "PERIOD_S", 0.05)
    monkeypatch.setattr(pulse, "PATIENCE_S", HANG_S)
    monkeypatch.setattr(pulse, "LINGER_S", 0.1)
    monkeypatch.setattr(pulse, "Stillness", CountedStillness)
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), False)
    monkeypatch.setattr(wire, "_given", [store])
    name = f"{wire.REJOINED}{next(_names)}"
    with ExitStack() as stack:
        found = []
        for rank in range(WORLD):
            own = Pulse(
                name, rank, WORLD, lambda alarm: None, lambda: None, lambda error: None
            )
            stack.callback(own.stop)
            found.append(own)
        yield found


def test_while_all_live_nobody_is_silent(ranks: list[Pulse]) -> None:
    assert [one.silent_ranks() for one in ranks] == [((), False)] * WORLD


@pytest.mark.parametrize("lost", range(WORLD))
def test_whoever_falls_silent_is_found_by_all_others(
    ranks: list[Pulse], lost: int
) -> None:
    assert all(len(one.signs()) == WORLD for one in ranks)
    ranks[lost].stop()
    others = [one for one in ranks if one.rank != lost]
    with ThreadPoolExecutor() as pool:
        assert [*pool.map(Pulse.silent_ranks, others)] == [((lost,), False)] * len(
            others
        )


def test_a_rank_that_the_store_did_not_reach_decides_nothing_for_the_others(
    ranks: list[Pulse], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network is whole again before the others raise an alarm of their own."""
    cut_off = ranks[1]
    # no probe has reached the other side either
    monkeypatch.setattr(cut_off.roll_call, "announce", lambda line: None)
    cut_off.is_cut_off = True
    cut_off.raise_alarm(Alarm((0, 2), 3, "the network is parted", ExitCode.NETWORK))
    assert ranks[0].raise_alarm(Alarm((1,), 3, "rank 1 is lost")).ranks == (1,)


@each(
    "mute_s, code, lost, is_cut_off",
    [
        (9.0, ExitCode.NETWORK, (0, 2), True),
        (0.1, ExitCode.NETWORK, (0, 2), False),
        (9.0, ExitCode.NETWORK, (), False),
        (9.0, ExitCode.RANK_LOST, (0,), False),
    ],
)
def test_a_rank_is_cut_off_if_the_network_is_parted_and_the_store_is_mute(
    mute_s: float, code: ExitCode, lost: tuple[int, ...], is_cut_off: bool
) -> None:
    seen: Any = SimpleNamespace(mute_s=mute_s, is_cut_off=False)
    engine: Any = SimpleNamespace(_pulse=seen)
    Engine._note_cut(engine, seen, Alarm(lost, 3, "a failure", code))
    assert seen.is_cut_off == is_cut_off
    if is_cut_off:
        assert Engine.next_epoch(engine, {}) == {}


class CountingStore:
    """A store that notes the name of each question that goes to its host."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name != "has_extended_api":
            self.asked.append(name)
        return getattr(self._store, name)


def test_a_far_store_is_asked_a_few_times_in_a_round_for_all_ranks_signs(
    ranks: list[Pulse],
) -> None:
    """Each question takes a round trip: a lost rank would be named seconds later."""
    assert len(ranks[0].signs()) == WORLD
    while not ranks[0].roll_call.is_complete:
        ranks[0].signs()
    store = CountingStore(ranks[0]._store)
    ranks[0]._store = store
    for _ in range(5):
        assert len(ranks[0].signs()) == WORLD
    rounds = " ".join(store.asked).split("set")[2:-1]
    assert rounds
    assert max(len(names.split()) for names in rounds) <= 2


@pytest.mark.parametrize("detaches", [True, False])
def test_a_rank_that_has_detached_is_told_from_one_that_has_ended(
    ranks: list[Pulse], detaches: bool
) -> None:
    """Its probe port is closed in both cases, and it may live on."""
    assert all(len(one.signs()) == WORLD for one in ranks)
    while not all(one.roll_call.is_complete for one in ranks):
        time.sleep(pulse.PERIOD_S)  # each reading here would count as silence of others
    ranks[1].detaches = detaches
    ranks[1].stop()
    alarm = silence(ranks[0], 7, WORLD)
    assert alarm is not None
    assert alarm.ranks == (1,)
    assert ("has detached" in alarm.text) == detaches
    assert ("process has ended" in alarm.text) == (not detaches)


def test_a_watched_rank_is_silent_once_its_number_has_stood_still_for_long(
    ranks: list[Pulse],
) -> None:
    """Nobody asks for signs meanwhile."""
    reads = ranks[0]
    assert reads.still_s(1) == 0.0
    until(lambda: len(reads._signs) == WORLD)
    assert not any(reads.still_s(rank) > HANG_S / 2 for rank in range(WORLD))
    ranks[1].stop()
    until(lambda: reads.still_s(1) > HANG_S / 2)
    assert not any(reads.still_s(rank) > HANG_S / 2 for rank in (0, 2))


def until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.005)


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
    ranks: list[Pulse],
    places: tuple[Place, ...],
    waiting: tuple[int, ...],
    late: tuple[int, ...],
) -> None:
    for one in ranks:
        one.place = places[one.rank]
        one.waits = lambda rank=one.rank: rank in waiting  # type: ignore[misc]
    reported = [(place, rank in waiting) for rank, place in enumerate(places)]
    end_s = time.monotonic() + HANG_S  # each look is at what was read anew
    while [sign[1:3] for sign in ranks[0].signs()] != reported:
        assert time.monotonic() < end_s
    assert ranks[0].last_ranks() == late


def test_an_engine_waits_while_messages_are_under_way_and_it_computes_nothing() -> None:
    limit = timedelta(seconds=HANG_S)
    engine = Engine(ALONE, num_channels=1, timeout=limit, on_span=lambda span: None)
    begun, go = threading.Event(), threading.Event()

    def encode() -> None:
        begun.set()
        go.wait(HANG_S)

    def steps() -> Steps[None]:
        yield Compute("encode", encode, LANE_NUMEL)

    assert not engine._waits()
    before = Task("before", lambda: None)
    end = engine.launch(0, "message 0", steps(), Launch(behind=[before]))
    assert engine._waits()
    engine.begin(before)
    assert begun.wait(HANG_S)
    assert not engine._waits()
    go.set()
    engine.wait([end])
    assert not engine._waits()
    engine.close()


# ---- A store that answers late is not taken for ranks that are dead ------------------


HERE, ENDED, MUTE, CUT = Reach.ANSWERS, Reach.ENDED, Reach.MUTE, Reach.CUT


class Clock:
    """Stands still but for those who wait; put in the place of the module ``time``."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Scripted(Pulse):
    """A pulse of rank 1 of 3 that reads these beats, each after a pause of the clock.

    It is its own ``_news``: only who waits for news has the clock go on.
    """

    def __init__(
        self, clock: Clock, script: Sequence[tuple[float, tuple[int, int, int]]]
    ) -> None:
        super().__init__(
            "test", 1, 3, lambda alarm: None, lambda: None, lambda error: None
        )
        self._clock, self._script = clock, iter(script)
        self._news: Any = self

    def _run(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def notify_all(self) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], patience_s: float) -> bool:
        end_s = self._clock.now_s + patience_s
        while not predicate():
            pause_s, beats = next(self._script, (patience_s, None))
            if beats is None or self._clock.now_s + pause_s > end_s:
                self._clock.now_s = end_s
                return False
            self._clock.now_s += pause_s
            self._note([Sign(beat, Place(0, 0, 0)) for beat in beats])
        return True


def read(monkeypatch: pytest.MonkeyPatch, *script: Any) -> tuple[tuple[int, ...], bool]:
    clock = Clock()
    monkeypatch.setattr(pulse, "PATIENCE_S", 0.3)
    monkeypatch.setattr(pulse, "PERIOD_S", 0.05)
    monkeypatch.setattr(pulse, "time", clock)
    return Scripted(clock, script).silent_ranks()


def test_what_a_store_does_not_tell_is_no_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, late = [(0.05, (7, 1, 7)), (0.02, (7, 2, 7))], (0.29, (7, 3, 7))
    assert read(monkeypatch, *first, late, (0.05, (9, 4, 9))) == ((), False)
    last_sign = [(0.04, (n, n, 7 + (n > 5))) for n in range(20)]
    assert read(monkeypatch, *last_sign) == ((2,), False)
    steady = [(0.04, (n, n, 7)) for n in range(12)]
    assert read(monkeypatch, *steady) == ((2,), False)
    for script in ([], first):  # no answer for as long as patience lasts
        assert read(monkeypatch, *script) == ((0,), True)


def test_local_steps_are_told_where_they_differ() -> None:
    one = Scripted(Clock(), [])
    for counts, said in (
        ((4, 4, 4), ""),
        (
            (4, 7, 4),
            " (local steps when last seen: rank 0 after 4, rank 1 after 7, rank "
            "2 after 4)",
        ),
    ):
        one._note([Sign(1, Place(0, 2, 1, count)) for count in counts])
        assert one.local_steps() == said
        assert one.last_ranks() == ()  # they take no part in the order of ranks


def test_a_number_stands_still_only_while_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, one, found = Clock(), Stillness(), list[float]()
    monkeypatch.setattr(pulse, "time", clock)
    for now_s, number in [
        (0.0, 4),
        (0.2, 4),
        (30.0, 4),
        (30.3, 4),
        (30.4, 5),
        (50.0, 5),
    ]:
        clock.now_s = now_s
        found.append(one.read(number))
    assert found == pytest.approx([0, 0.2, 0.7, 1.0, 0, 0.5])


class Silent:
    """A pulse of rank 1 of 3 whose store answers at the given look, if at all."""

    rank, store_is_lost = 1, False

    def __init__(
        self, reach: list[dict[int, Reach]], answers: int, mute_s: float = 9.0
    ) -> None:
        self.mute_s = mute_s
        self._reach, self._answers, self.looks = reach, answers, 0
        self.roll_call, self._asked = self, threading.Semaphore(0)

    def ask(self) -> tuple[dict[int, Reach], bytes]:
        found = self._reach[min(self.looks, len(self._reach) - 1)]
        self._asked.release()
        return found, b""

    def detached(self) -> set[int]:
        return set()

    def local_steps(self) -> str:
        return ""

    def silent_ranks(self) -> tuple[tuple[int, ...], bool]:
        assert self._asked.acquire(timeout=HANG_S)
        self.looks += 1
        is_silent = self.looks < self._answers
        return ((0,) if is_silent else ()), is_silent

    def monotonic(self) -> float:
        """A clock on which each look takes a second."""
        return float(self.looks)


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
    one: Any = Silent(reach, answers)
    monkeypatch.setattr(blame, "STORE_PATIENCE_S", 2.5)
    monkeypatch.setattr(blame, "ASK_S", HANG_S)
    monkeypatch.setattr(blame, "time", one)
    alarm = silence(one, 7, 3)
    reported = None if alarm is None else (alarm.ranks, alarm.code)
    assert (reported, one.looks) == (found, looks)
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


@pytest.mark.parametrize(
    ("address", "interface", "name", "is_hinted"),
    [
        ("127.0.1.1", None, "connect", True),
        ("127.0.1.1", "eth0", "connect", False),
        ("10.0.0.5", None, "connect", False),
        ("127.0.1.1", None, "broadcast", False),
    ],
)
def test_a_host_name_that_is_the_loopback_is_named_where_ranks_cannot_connect(
    address: str,
    interface: str | None,
    name: str,
    is_hinted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostbyname", lambda host: address)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    engine = Engine(
        ALONE, num_channels=0, timeout=timedelta(seconds=1), on_span=lambda span: None
    )
    text = str(
        engine.unreachable(name, RuntimeError("failed to connect, remote=[127.0.1.1]"))
    )
    engine.close()
    assert ("GLOO_SOCKET_IFNAME" in text) is is_hinted
    assert ("restart the job" in text) is not is_hinted
