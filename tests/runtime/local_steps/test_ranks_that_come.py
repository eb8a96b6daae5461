"""A new process comes into local steps that go on, on real ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.exchange.rounds import FragmentLearner
from gradwire.runtime.local_steps.mail import NAME
from gradwire.runtime.local_steps.outer import DILOCO
from gradwire.runtime.transport.wire import root_store
from tests.runtime.local_steps.test_partial_steps import prepared
from tests.runtime.ranks import Ranks
from tests.runtime.survive.test_rejoin import die
from tests.runtime.training import digest, train

pytestmark = [pytest.mark.multi, pytest.mark.slow, pytest.mark.timeout(180)]
Pools = Callable[[int], Ranks]
LIMIT = timedelta(seconds=60)


class Report(NamedTuple):
    """What a rank has seen at the end."""

    bits: str
    anchors: str
    outer: str
    ranks: tuple[int, ...]
    left: list[tuple[int, ...]]
    joined: list[dict[str, Any]]
    steps_of_all: int
    step: int


def happens(what: str) -> None:
    root_store().set(what, "")


def has_happened(what: str) -> bool:
    return bool(root_store().check([what]))


def num_threads() -> int:
    """The threads of this process that carry rounds."""
    return sum(one.name.startswith(NAME) for one in threading.enumerate())


def train_until(
    net: Any, optimizer: Any, handle: Any, ready: Callable[[], bool]
) -> None:
    while not ready():
        train(net, optimizer, handle.rank, [handle.step])


def train_to_the_end(net: Any, optimizer: Any, handle: Any, world: int) -> Any:
    """Trains until work of all newcomers is in a merge on all ranks."""

    def are_counted() -> bool:
        stats = handle.stats()
        is_whole = len(stats["ranks"]) == world
        lost = {rank for one in stats["left"] for rank in one["ranks"]}
        joined = [one for one in stats["joined"] if one["rank"] not in lost]
        is_counted = is_whole and all(one["counted_s"] for one in joined)
        # those of connections before end
        return is_counted and num_threads() == 1 + 2 * (world - 1)

    train_until(net, optimizer, handle, are_counted)
    happens(f"rank {handle._number} has seen all")
    train_until(
        net,
        optimizer,
        handle,
        lambda: all(
            has_happened(f"rank {number} has seen all")
            for number in handle._service._labels
        ),
    )
    handle.end_period()
    stats = handle.stats()
    states = handle.outer.state
    outer = digest(
        value
        for anchor in handle.outer.param_groups[0]["params"]
        for value in states[anchor].values()
        if isinstance(value, torch.Tensor)
    )
    report = Report(
        bits=digest(net),
        anchors=digest(handle.anchors().values()),
        outer=outer,
        ranks=stats["ranks"],
        left=[one["ranks"] for one in stats["left"]],
        joined=stats["joined"],
        steps_of_all=handle.steps_of_all,
        step=handle.step,
    )
    handle.detach()
    return report


def settings_of(**more: Any) -> dict[str, Any]:
    failure = gw.FailurePolicy(on_failure="shrink", timeout=LIMIT, **more)
    return {"exchange": "topk", "fragments": 2, "outer": DILOCO, "failure": failure}


def goes_on(rank: int, world: int, port: int, dead: set[int], end: int) -> Any:
    """Trains among ranks of which some die; the store is none of theirs.

    ``end`` is the number of ranks at the end.
    """
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, None, False, LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    net, optimizer, handle = prepared(**settings_of())
    train(net, optimizer, rank, range(6))
    if rank in dead:
        die()

    def has_lost() -> bool:
        return sum(len(one["ranks"]) for one in handle.stats()["left"]) == len(dead)

    train_until(net, optimizer, handle, has_lost)
    store.set("the run waits for newcomers", "")
    return train_to_the_end(net, optimizer, handle, end)


def comes_in(rank: int, world: int, port: int, how: str, end: int) -> Any:
    """A process of no group, whose parameters are others."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, None, False, LIMIT)
    while not store.check(["the run waits for newcomers"]):
        time.sleep(0.02)
    if how == "dies when it is offered a place":
        gw.runtime.survive.rejoin.Newcomer.enter = die  # type: ignore[method-assign]
    if how == "dies while it gets anchors":
        FragmentLearner.catch_up = die  # type: ignore[method-assign]
    torch.manual_seed(99)
    net, optimizer, handle = prepared(**settings_of(rejoin=store))
    return train_to_the_end(net, optimizer, handle, end)


held: list[dist.TCPStore] = []


def new_store() -> int:
    """A store that this process holds; returns its port."""
    held.append(dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, False))
    return int(held[-1].port)


CASES: dict[str, tuple[set[int], list[str]]] = {
    "one in place of one": ({1}, [""]),
    "one in place of rank 0": ({0}, [""]),
    "two at once": (set(), ["", ""]),
    "one beside a rank alone": ({1, 2}, [""]),
    "one dies before it connects": (set(), ["dies when it is offered a place", ""]),
    "one dies as it gets anchors": (set(), ["dies while it gets anchors", ""]),
}


@pytest.mark.parametrize(("dead", "newcomers"), CASES.values(), ids=CASES)
def test_a_newcomer_counts(
    dead: set[int], newcomers: list[str], ranks_of: Pools
) -> None:
    port = new_store()
    pool = ranks_of(3)
    coming = [ranks_of(1) for _ in newcomers]
    end = 3 - len(dead) + sum("dies" not in how for how in newcomers)
    for one, how in zip(coming, newcomers, strict=True):
        one.send(comes_in, port, how, end)
    pool.send(goes_on, port, dead, end)
    reports = pool.survivors(dead)
    for one, how in zip(coming, newcomers, strict=True):
        if "dies" not in how:
            reports += one.survivors(())
    first = reports[0]
    assert len(first.ranks) == end
    assert {one.bits for one in reports} == {one.anchors for one in reports}
    assert len({one.bits for one in reports}) == 1
    assert len({one.outer for one in reports}) == 1
    assert len({one.ranks for one in reports}) == 1
    assert len({one.steps_of_all for one in reports}) == 1
