"""Epochs: the ranks that live agree on who goes on, again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from gradwire.runtime.liveness import membership, pulse
from gradwire.runtime.liveness.alarm import Alarm
from gradwire.runtime.liveness.blame import silence
from gradwire.runtime.liveness.epochs import next_epoch
from gradwire.runtime.liveness.membership import Membership
from gradwire.runtime.liveness.pulse import Pulse
from gradwire.runtime.transport import wire

WORLD = 4
HANG_S = 60.0
"""Seconds after which a wait of these tests counts as one that never ends."""
LIMIT = timedelta(seconds=HANG_S)
_names = count()


class Rank:
    """One rank in a thread of this process, and the alarms that it hears."""

    def __init__(self, who: Membership) -> None:
        self.who = who
        self.heard: list[Alarm] = []
        self.pulse = Pulse(
            who.name,
            who.rank,
            who.world,
            self.heard.append,
            lambda: None,
            lambda error: None,
        )
        self.pulse.lingers = False

    def next(self, own: Any, *lost: int, ranks_per_host: int = 1) -> dict[int, Any]:
        return next_epoch(self.pulse, self.who, own, LIMIT, lost, ranks_per_host)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    """Four ranks that know each other's probe ports, with a store beside them."""
    monkeypatch.setattr(pulse, "PERIOD_S", 0.05)
    monkeypatch.setattr(pulse, "PATIENCE_S", HANG_S)
    monkeypatch.setattr(pulse, "ENDED_S", 0.2)
    monkeypatch.setattr(membership, "_LOOK_S", 0.02)
    store = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, False)
    monkeypatch.setattr(wire, "_given", [store])
    name = f"{wire.REJOINED} epochs {next(_names)}"
    with ExitStack() as stack:
        found = []
        for rank in range(WORLD):
            own = Rank(Membership(name, rank, WORLD))
            stack.callback(own.pulse.stop)
            found.append(own)
        until(lambda: all(one.pulse.roll_call.is_complete for one in found))
        yield found


def announce(lost: int, one: Rank) -> dict[int, Any]:
    return one.next(one.who.numbers[one.who.rank] * 10, lost)


def until(is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_survivors_agree_on_epoch_after_epoch(ranks: list[Rank]) -> None:
    """All have the same ranks and values, and each epoch has its own alarm."""
    numbers = [*range(WORLD)]
    with ExitStack() as stack:
        for lost in (1, 2):
            ranks[lost].pulse.stop()
            own = [one for one in ranks if one.who.rank != lost]
            alarm = silence(own[0].pulse, 7, len(ranks))
            assert alarm is not None
            assert alarm.ranks == (lost,)
            own[0].pulse.raise_alarm(alarm, lingers=False)
            for other in own[1:]:
                until(lambda other=other: bool(other.heard))
                assert other.heard == [alarm]
            with ThreadPoolExecutor() as pool:
                epochs = [*pool.map(partial(announce, lost), own)]
            values = {n: numbers[n] * 10 for n in range(len(ranks)) if n != lost}
            assert epochs == [values] * len(own)
            del numbers[lost]
            ranks = [Rank(one.who.going_on([*values])) for one in own]
            assert {one.who.numbers for one in ranks} == {tuple(numbers)}
            for one in ranks:
                stack.callback(one.pulse.stop)
            until(lambda ranks=ranks: all(r.pulse.roll_call.is_complete for r in ranks))


def test_a_rank_that_comes_too_late_finds_itself_left_out(ranks: list[Rank]) -> None:
    """Others hold it for lost, so there are never two groups that go on."""
    with ThreadPoolExecutor() as pool:
        epochs = [*pool.map(lambda one: one.next("", 3), ranks[:3])]
    assert [[*epoch] for epoch in epochs] == [[0, 1, 2]] * 3
    assert [*ranks[3].next("")] == [0, 1, 2]


def test_two_sides_that_hold_each_other_for_lost_are_one_that_goes_on(
    ranks: list[Rank],
) -> None:
    lost = {0: (2, 3), 1: (2, 3), 2: (0, 1), 3: (0, 1)}
    with ThreadPoolExecutor() as pool:
        epochs = [
            *pool.map(lambda one: one.next("", *lost[one.who.rank]), ranks),
        ]
    went_on = [rank for rank, epoch in enumerate(epochs) if rank in epoch]
    assert went_on in ([0, 1], [2, 3])
    assert all([*epochs[rank]] == went_on for rank in went_on)


def test_a_rank_whose_store_is_silent_for_the_time_out_asks_for_no_signs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody can decide then, and each question would take seconds more."""
    monkeypatch.setattr(membership, "_LOOK_S", 0.02)
    never = threading.Event()
    monkeypatch.setattr(wire, "_given", [SimpleNamespace(clone=never.wait)])
    mute = SimpleNamespace(mute_s=9.0)
    who = Membership("0-1-2", 0, 3)
    try:
        assert next_epoch(mute, who, "", timedelta(seconds=8)) == {}  # type: ignore[arg-type]
    finally:
        never.set()


def test_a_host_goes_on_whole_or_not_at_all(ranks: list[Rank]) -> None:
    """A rank leaves with its host, whether its loss is named or found out."""
    with ThreadPoolExecutor() as pool:
        named = [*pool.map(lambda one: one.next("", 3, ranks_per_host=2), ranks[:3])]
    assert [[*epoch] for epoch in named] == [[0, 1], [0, 1], []]


def test_who_shares_a_host_with_a_rank_that_is_found_to_be_gone_leaves(
    ranks: list[Rank],
) -> None:
    ranks[3].pulse.stop()
    for one in ranks[:3]:
        one.pulse.roll_call.ask()
    with ThreadPoolExecutor() as pool:
        found = [*pool.map(lambda one: one.next("", ranks_per_host=2), ranks[:3])]
    assert [[*epoch] for epoch in found] == [[0, 1]] * 3


def test_a_lost_rank_that_nobody_has_named_ends_the_wait(ranks: list[Rank]) -> None:
    """A second one ends while the others agree: they see its number stand still."""
    ranks[2].pulse.stop()
    for one in ranks[:2]:
        one.pulse.roll_call.ask()
    with ThreadPoolExecutor() as pool:
        epochs = [*pool.map(lambda one: one.next("", 3), ranks[:2])]
    assert [[*epoch] for epoch in epochs] == [[0, 1]] * 2


def test_a_rank_that_has_ended_is_known_before_its_patience_is_over(
    ranks: list[Rank],
) -> None:
    """Its probe port refuses, and patience is for ever here."""
    ranks[2].pulse.stop()
    alarm = silence(ranks[0].pulse, 7, WORLD)
    assert alarm is not None
    assert alarm.ranks == (2,)
    assert "its process has ended" in alarm.text


def test_a_rank_that_lives_behind_a_port_that_refuses_is_not_lost(
    ranks: list[Rank],
) -> None:
    """A firewall may refuse connections, and a rank may be too busy to answer."""
    ranks[2].pulse.roll_call.close()
    assert silence(ranks[0].pulse, 7, WORLD) is None
    assert 2 in ranks[0].pulse.roll_call.ended


def test_who_waits_for_signs_is_not_held_up_as_the_pulse_stops(
    ranks: list[Rank],
) -> None:
    """A rank that hears of a loss may be in the midst of finding out about it."""
    waits = threading.Event()
    reads = ranks[0].pulse

    def watch() -> tuple[tuple[int, ...], bool]:
        with reads._watching():
            waits.set()
        return reads.silent_ranks()

    ranks[2].pulse._stop.set()  # its number stands still, and its port answers
    with ThreadPoolExecutor() as pool:
        found = pool.submit(watch)
        assert waits.wait(HANG_S)
        begin_s = time.monotonic()
        reads.stop()
        found.result(HANG_S)
        assert time.monotonic() - begin_s < HANG_S / 2
