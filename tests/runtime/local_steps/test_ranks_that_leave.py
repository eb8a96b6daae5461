"""Local steps with a quorum go on without lost ranks, on real ranks."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest

import gradwire as gw
from gradwire.runtime.transport.wire import root_store
from tests.each import each
from tests.runtime.local_steps.test_partial_steps import await_event, happens, prepared
from tests.runtime.ranks import Ranks
from tests.runtime.training import digest, train

pytestmark = [pytest.mark.multi, pytest.mark.slow, pytest.mark.timeout(180)]
Pools = Callable[[int], Ranks]
SHRINK = gw.FailurePolicy(on_failure="shrink", timeout=timedelta(seconds=60))


class Report(NamedTuple):
    """What a survivor has seen."""

    bits: str
    anchors: str
    left: list[tuple[int, ...]]
    ranks: tuple[int, ...]
    has_quorum: bool
    world: int
    warnings: list[str]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def watched_log() -> list[str]:
    """The warnings of this process from now on."""
    found: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logging.getLogger("gradwire").addHandler(Keeps(logging.WARNING))
    return found


def train_until(
    net: Any, optimizer: Any, handle: Any, ready: Callable[[], bool]
) -> None:
    while not ready():
        train(net, optimizer, handle.rank, [handle.step])


def reported(net: Any, handle: Any, warnings: list[str]) -> Report:
    stats = handle.stats()
    report = Report(
        bits=digest(net),
        anchors=digest(handle.anchors().values()),
        left=[one["ranks"] for one in stats["left"]],
        ranks=stats["ranks"],
        has_quorum=stats["has_quorum"],
        world=handle.world_size,
        warnings=[text for text in warnings if "of the job" in text],
    )
    handle.detach()
    return report


def going_on(rank: int, world: int, dead: dict[int, int]) -> Report | None:
    """Each rank in ``dead`` dies after so many steps; fragments have all owners."""
    warnings = watched_log()
    net, optimizer, handle = prepared(
        exchange="topk", fragments=4, quorum=2, failure=SHRINK
    )
    if rank in dead:
        train(net, optimizer, rank, range(dead[rank]))
        die()
    lost = lambda: sum(len(one["ranks"]) for one in handle.stats()["left"])  # noqa: E731
    train_until(net, optimizer, handle, lambda: lost() == len(dead))
    if handle.stats()["has_quorum"]:
        before = [learner.version for learner in handle._rounds.learners]
        learners = handle._rounds.learners
        train_until(
            net,
            optimizer,
            handle,
            lambda: all(
                learner.version > version + 1
                for learner, version in zip(learners, before, strict=True)
            ),
        )
    handle.end_period()
    return reported(net, handle, warnings)


@each("dead", [{2: 7}, {1: 6, 3: 6}, {1: 6, 2: 20}], ids=str)
def test_survivors_train_on(dead: dict[int, int], ranks_of: Pools) -> None:
    pool = ranks_of(4)
    pool.send(going_on, dead)
    reports = pool.survivors(set(dead))
    first = reports[0]
    assert all(one.bits == one.anchors == first.bits for one in reports)
    for one in reports:
        assert sorted(rank for ranks in one.left for rank in ranks) == sorted(dead)
        assert one.ranks == tuple({*range(4)} - {*dead})
        assert one.world == 4 - len(dead)
        assert one.has_quorum
        assert one.warnings


def left_alone(rank: int, world: int) -> Report | None:
    warnings = watched_log()
    net, optimizer, handle = prepared(failure=SHRINK)
    train(net, optimizer, rank, range(6))
    if rank == 1:
        die()
    train_until(net, optimizer, handle, lambda: bool(handle.stats()["left"]))
    before = handle.stats()["exchanges"]
    train(net, optimizer, rank, range(12))
    assert handle.stats()["exchanges"] <= before + 1
    handle.end_period()
    return reported(net, handle, warnings)


def test_a_rank_alone_says_so_and_merges_at_the_end(
    ranks_of: Pools,
) -> None:
    pool = ranks_of(2)
    pool.send(left_alone)
    (report,) = pool.survivors({1})
    assert report.left == [(1,)]
    assert not report.has_quorum
    assert report.bits == report.anchors
    assert "this rank trains alone" in report.warnings[0]


def lost_at_the_end(rank: int, world: int) -> Report | None:
    """Rank 2 dies while the others wait for it in ``end_period``."""
    warnings = watched_log()
    net, optimizer, handle = prepared(fragments=4, quorum=2, failure=SHRINK)
    train(net, optimizer, rank, range(6 + rank))
    if rank == 2:
        await_event("all others wait")
        die()
    announce = handle._service._announce

    def announced(note: Any) -> None:
        announce(note)
        happens(f"rank {rank} waits")
        if rank == 0:
            for other in (1, 3):
                await_event(f"rank {other} waits")
            happens("all others wait")

    handle._service._announce = announced
    handle.end_period()
    return reported(net, handle, warnings)


def test_a_rank_that_is_lost_at_the_end_holds_nobody_up(
    ranks_of: Pools,
) -> None:
    pool = ranks_of(4)
    pool.send(lost_at_the_end)
    reports = pool.survivors({2})
    assert {one.bits for one in reports} == {one.anchors for one in reports}
    assert len({one.bits for one in reports}) == 1
    assert all(one.left == [(2,)] for one in reports)


def stopped(rank: int, world: int) -> Report:
    """Rank 1 stands still for longer than the time-out, and comes back."""
    failure = gw.FailurePolicy(on_failure="shrink", timeout=timedelta(seconds=20))
    warnings = watched_log()
    net, optimizer, handle = prepared(fragments=4, failure=failure)
    train(net, optimizer, rank, range(5))
    if rank == 1:
        root_store().set("who stops", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        train_until(net, optimizer, handle, lambda: bool(handle.stats()["left"]))
        happens(f"rank {rank} goes on")
    if rank == 0:
        await_event("rank 2 goes on")
        os.kill(int(root_store().get("who stops")), signal.SIGCONT)
    train_until(net, optimizer, handle, lambda: is_whole_again(handle))
    handle.end_period()
    return reported(net, handle, warnings)


def reconnected(rank: int, world: int) -> Report:
    """Rank 1's connections break, and every rank lives."""
    warnings = watched_log()
    net, optimizer, handle = prepared(fragments=4, quorum=2, failure=SHRINK)
    train(net, optimizer, rank, range(6))
    if rank == 1:
        handle._service._mail.cut()
    rounds = handle._rounds
    train_until(net, optimizer, handle, lambda: rounds.epoch.number > 0)
    before = [learner.version for learner in rounds.learners]

    def are_merged() -> bool:
        pairs = zip(rounds.learners, before, strict=True)
        return all(learner.version > version + 1 for learner, version in pairs)

    train_until(net, optimizer, handle, are_merged)
    handle.end_period()
    return reported(net, handle, warnings)


def test_ranks_that_live_connect_anew_where_a_connection_breaks(
    ranks_of: Pools,
) -> None:
    reports = ranks_of(4).run(reconnected)
    assert len({one.bits for one in reports}) == 1
    assert all(one.bits == one.anchors for one in reports)
    assert [one.left for one in reports] == [[]] * 4
    assert all(one.ranks == (0, 1, 2, 3) for one in reports)


def is_whole_again(handle: Any) -> bool:
    joined = handle.stats()["joined"]
    return bool(joined) and all(one["counted_s"] for one in joined)


def test_a_rank_that_stops_too_long_trains_on_alone_and_comes_back(
    ranks_of: Pools,
) -> None:
    pool = ranks_of(3)
    reports = pool.run(stopped)
    assert len({one.bits for one in reports}) == 1
    assert [one.left for one in reports] == [[(1,)], [(0, 2)], [(1,)]]
    assert all(one.ranks == (0, 1, 2) for one in reports)
    assert "cannot reach rank 0, 2" in reports[1].warnings[0]
