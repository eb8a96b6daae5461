"""A plan with a coordinator trains the same bits, and a lost coordinator is named."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import gradwire as gw
from gradwire.errors import InvalidSetting
from gradwire.planning.data.plan import (
    Bulk,
    Chunk,
    ExchangeSetting,
    Plan,
    PlannedMessage,
)
from tests.each import few
from tests.runtime.ranks import Ranks
from tests.runtime.training import Net, digest, momentum, train

pytestmark = pytest.mark.multi

NUM_STEPS = 3
EXCHANGES = {
    "casync_ps": ExchangeSetting(
        compressor="onebit", collective="casync_ps", error_feedback=True
    ),
    "casync_ring": ExchangeSetting(
        compressor="topk", settings={"density": 0.1}, collective="casync_ring"
    ),
    "varying": ExchangeSetting(compressor="nonzero", collective="casync_ps"),
}
RULES = (Bulk(timeout_s=0.0), Bulk(rank=1, timeout_s=0.002, size_bytes=500))


def plan_of(model: nn.Module, bulk: Bulk | None, *names: str) -> Plan:
    """A message for each parameter, through exchanges in turn; one is dense."""
    messages = [
        PlannedMessage(
            chunks=(Chunk(tensor=name, start=0, stop=param.numel()),),
            exchange=names[place % len(names)] if place else "dense",
        )
        for place, (name, param) in enumerate(reversed([*model.named_parameters()]))
    ]
    return Plan(
        planner="test",
        model="Net",
        messages=tuple(messages),
        credit=2,
        exchanges={name: EXCHANGES[name] for name in names},
        bulk=bulk,
    )


def trained(
    rank: int, bulk: Bulk | None, *names: str, late: int = -1
) -> tuple[str, tuple[int, int]]:
    """The bits of a model, and bytes told and batches sent of this rank.

    Rank ``late`` begins its second step once all its threads have nothing to do.
    """
    model = Net()
    optimizer = momentum(model.parameters())
    handle = gw.attach(model, plan_of(model, bulk, *names), optimizer=optimizer)
    slots = handle._engine.slots
    train(model, optimizer, rank, range(1))
    if rank == late:
        # nobody can go on without it, so nothing depends on how long it waits
        threading.Event().wait(0.5)
    train(model, optimizer, rank, range(1, NUM_STEPS))
    handle.detach()
    figures = (0, 0) if slots is None else (slots.told_bytes, slots.num_batches)
    return digest(model), figures


def with_and_without(rank: int, world: int, names: tuple[str, ...]) -> list[Any]:
    late = world - 1
    return [trained(rank, bulk, *names, late=late) for bulk in (None, *RULES)]


@few("names", [("casync_ring", "varying"), ("casync_ps",)], ids=str)
def test_a_coordinator_trains_the_same_bits(
    names: tuple[str, ...], four: Ranks
) -> None:
    for (want, _), *others in four.run(with_and_without, names):
        for bits, (told_bytes, num_batches) in others:
            assert bits == want
            assert told_bytes > 0
            assert num_batches > 0


def test_a_coordinator_on_no_rank_is_refused(two: Ranks) -> None:
    for text in two.run(_refused, Bulk(rank=2)):
        assert "plan.bulk.rank must be one of 2 ranks, got 2" in text


def _refused(rank: int, world: int, bulk: Bulk) -> str:
    model = Net()
    with pytest.raises(InvalidSetting) as caught:
        gw.attach(model, plan_of(model, bulk, "casync_ps"))
    return str(caught.value)


def lose(rank: int, world: int, lost: int) -> tuple[str, Any]:
    model = Net()
    optimizer = momentum(model.parameters())
    plan = plan_of(model, RULES[0], "casync_ps")
    gw.attach(model, plan, optimizer=optimizer)
    try:
        # a rank that ends may end while others are still at this step
        train(model, optimizer, rank, range(1))
        if rank == lost:
            os._exit(1)
        train(model, optimizer, rank, range(1, 3))
    except gw.RankFailed as error:
        return type(error).__name__, error.ranks
    return "nothing", ()


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 2])
def test_a_lost_coordinator_is_a_lost_rank_and_is_named(
    lost: int, ranks_of: Callable[[int], Ranks]
) -> None:
    ranks = ranks_of(3)
    ranks.send(lose, lost)
    for found in ranks.survivors({lost}):
        assert found == ("RankFailed", (lost,))
