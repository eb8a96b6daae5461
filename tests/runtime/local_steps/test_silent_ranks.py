"""Ranks of local steps with a quorum that fall silent, or were away meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

import gradwire as gw
from gradwire.errors import ExitCode, RankFailed
from gradwire.runtime.engine.engine import Engine
from gradwire.runtime.liveness.membership import Membership
from gradwire.runtime.liveness.pulse import Pulse
from gradwire.runtime.local_steps import round_service
from gradwire.runtime.local_steps.going_on import go_on_without
from tests.each import each
from tests.runtime.local_steps.test_partial_steps import await_event, happens, prepared
from tests.runtime.local_steps.test_ranks_that_leave import (
    is_whole_again,
    train_until,
    watched_log,
)
from tests.runtime.ranks import Ranks
from tests.runtime.training import digest, train

LIMIT = timedelta(seconds=60)
SHRINK = gw.FailurePolicy(on_failure="shrink", timeout=LIMIT)


def looked_for(rank: int, world: int) -> tuple[list[int], list[int]]:
    """The ranks that rank 0 looks for while the other one is there, and afterwards."""
    looked = threading.Event()
    asked: set[int] = set()

    def still_s(pulse: Pulse, rank: int) -> float:
        asked.add(rank)
        looked.set()
        return 0.0

    with patch.object(Pulse, "still_s", still_s):
        net, optimizer, handle = prepared()
        train(net, optimizer, rank, range(2))
        if rank == 0:
            assert looked.wait(LIMIT.total_seconds())
            happens("rank 0 has looked")
        await_event("rank 0 has looked")
        handle.end_period()
        while rank == 0 and not handle._service._left:
            handle._service._news.wait(0.02)
        then = handle._service._awaited()
        handle.detach()
    return [*asked], then


@pytest.mark.multi
def test_a_rank_looks_for_all_others_that_have_not_left(two: Ranks) -> None:
    """No message would tell that one stands still."""
    found, _ = two.run(looked_for)
    assert found == ([1], [])


def test_an_engine_that_watches_looks_again_until_it_fails() -> None:
    looks: list[int] = []
    over = threading.Event()
    awaited = [[], [1], [1]]

    def refuse_silence(step: int) -> None:
        looks.append(step)
        engine.failure = RuntimeError()
        over.set()

    still_s = iter([59.0, 61.0])
    engine: Any = SimpleNamespace(
        _pulse=SimpleNamespace(
            mute_s=0.0,
            still_s=lambda rank: next(still_s),
        ),
        _step=0,
        _local_step=7,
        _closed=None,
        failure=None,
        timeout=LIMIT,
        refuse_silence=refuse_silence,
    )
    Engine.watch(engine, lambda: awaited.pop(0))
    assert over.wait(LIMIT.total_seconds())
    assert looks == [7]
    assert awaited == []


@each("limit_s, mute_s, is_silent", [(8, 4, 0), (8, 6, 1), (2, 2, 0), (2, 4, 1)])
def test_a_store_is_silent_early_enough_to_find_out_why(
    limit_s: int, mute_s: float, is_silent: bool
) -> None:
    """It takes three seconds to find out."""
    found: list[str] = []
    over = threading.Event()

    def still_s(rank: int) -> float:
        found.append("not yet")
        return 9.0

    def refuse_silence(step: int) -> None:
        engine.failure = RuntimeError()
        over.set()

    engine: Any = SimpleNamespace(
        _pulse=SimpleNamespace(mute_s=mute_s, still_s=still_s),
        _step=0,
        _local_step=7,
        _closed=None,
        failure=None,
        timeout=timedelta(seconds=limit_s),
        refuse_silence=refuse_silence,
    )
    Engine.watch(engine, lambda: [1])
    assert over.wait(LIMIT.total_seconds())
    assert found == ([] if is_silent else ["not yet"])


@each("trains", [True, False])
@each(
    "lost, code",
    [((0, 2), ExitCode.NETWORK), ((1, 2), ExitCode.RANK_LOST)],
    ids=["cut off", "given up by the others"],
)
def test_a_rank_that_is_cut_off_goes_on_alone_only_while_it_trains(
    lost: tuple[int, ...], code: ExitCode, trains: bool
) -> None:
    """In a joint call it would wait for ranks that it cannot reach."""
    closed = threading.Event()
    who = Membership("silent", 1, 3)
    old: Any = SimpleNamespace(
        rank=1,
        world=3,
        everyone=who,
        num_together=1,
        next_epoch=lambda own, lost: {},
        signs=list,
        close=closed.set,
    )
    cut = RankFailed("no way", ranks=lost, exit_code=code)

    def go_on() -> Any:
        return go_on_without(old, cut, lambda who: who, {}, 0.0, trains=trains)

    if not trains:
        with pytest.raises(RankFailed, match="no way"):
            go_on()
        return
    run = go_on()
    assert run.is_parted
    assert run.engine.numbers == (1,)
    assert closed.wait(LIMIT.total_seconds())


class Report(NamedTuple):
    """What a rank has seen at the end."""

    bits: str
    anchors: str
    num_calls: int
    steps_of_all: int
    step: int
    alone: list[str]
    missed: list[str]


def away(rank: int, world: int, call: str, waits: bool) -> Report:
    """Rank 1 is away while the others make a joint call, and comes back.

    If it ``waits``, it has made its own call by then.
    """
    warnings = watched_log()
    net, optimizer, handle = prepared(fragments=2, failure=SHRINK)
    if rank == 1:
        ask = round_service.Returning.ask

        def ask_late(returning: Any, *given: Any) -> Any:
            await_event("the others have made the call")
            return ask(returning, *given)

        round_service.Returning.ask = ask_late  # type: ignore[method-assign]
    train(net, optimizer, rank, range(5))
    if rank == 0:
        # as if rank 1 had shown no sign of life
        with suppress(RankFailed):
            raise handle._engine.lose((1,), handle.step, "rank 1 is away", "this test")
    train_until(net, optimizer, handle, lambda: bool(handle.stats()["left"]))
    if rank != 1:
        getattr(handle, call)()
        happens(f"rank {rank} has made the call")
        if rank == 0:
            await_event("rank 2 has made the call")
            happens("the others have made the call")
    if rank == 1 and waits:
        getattr(handle, call)()
    train_until(net, optimizer, handle, lambda: is_whole_again(handle))
    if rank == 1 and not waits:
        getattr(handle, call)()
    train(net, optimizer, rank, [handle.step + at for at in range(6)])
    handle.end_period()
    report = Report(
        bits=digest(net),
        anchors=digest(handle.anchors().values()),
        num_calls=handle._service._num_met,
        steps_of_all=handle.steps_of_all,
        step=handle.step,
        alone=[text for text in warnings if "alone" in text],
        missed=[text for text in warnings if "was away" in text],
    )
    handle.detach()
    return report


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.timeout(240)
@each(
    "call, waits", [("end_period", False), ("end_period", True), ("state_dict", False)]
)
def test_a_joint_call_that_a_rank_has_missed_is_over_for_it(
    call: str, waits: bool, ranks_of: Callable[[int], Ranks]
) -> None:
    """Its next call meets the others' next one, and nothing is lost or differs."""
    reports = ranks_of(3).run(away, call, waits)
    assert len({one.bits for one in reports}) == 1
    assert {one.anchors for one in reports} == {reports[0].bits}
    assert {one.num_calls for one in reports} == {2}
    of_all = sum(one.step for one in reports)
    assert {one.steps_of_all for one in reports} == {of_all}
    # it says each once
    assert [len(one.alone) for one in reports] == [0, 1, 0]
    assert [len(one.missed) for one in reports] == [0, 1, 0]
