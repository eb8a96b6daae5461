"""The pulse: every rank that falls silent is found, whichever it is, and by each of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from itertools import count

import pytest
import torch.distributed as dist

from gradwire.contract.verbs import Compute, Steps
from gradwire.runtime.failure import pulse
from gradwire.runtime.failure.membership import ALONE
from gradwire.runtime.failure.pulse import Place, Pulse
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
