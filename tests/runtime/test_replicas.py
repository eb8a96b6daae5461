"""After twenty steps all ranks hold the same bits, whatever the exchange, and have learnt."""

from __future__ import annotations

import pytest

import gradwire as gw
from gradwire.contract import Exchange
from tests.runtime.given import SMALL
from tests.runtime.ranks import Ranks
from tests.runtime.training import (
    DENSE,
    EXCHANGES,
    ONEBIT,
    OPTIMIZERS,
    TOPK,
    Net,
    ddp,
    digest,
    named,
    train,
)

pytestmark = pytest.mark.multi
NUM_STEPS = 20


def replica(
    rank: int, world: int, exchange: Exchange, wrapped: bool, optimizer: str
) -> tuple[str, int, float, float]:
    net = Net(seed=0 if wrapped else rank)
    model = ddp(net) if wrapped else net
    handle = gw.attach(model, exchange, options=SMALL)
    losses = train(model, OPTIMIZERS[optimizer](model.parameters()), rank, range(NUM_STEPS))
    messages = len(handle.synchroniser.messages)
    handle.detach()
    return digest(net), messages, sum(losses[:5]), sum(losses[-5:])


def check(pool: Ranks, exchange: Exchange, wrapped: bool, optimizer: str) -> None:
    found = pool.run(replica, exchange, wrapped, optimizer)
    assert len({bits for bits, *_ in found}) == 1
    assert all(messages >= 3 for _, messages, _, _ in found)
    first, last = (sum(column) for column in zip(*(f[2:] for f in found), strict=True))
    assert last < first


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES[::2], ids=named)
def test_modules_with_momentum(exchange: Exchange, four: Ranks) -> None:
    check(four, exchange, False, "momentum")


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES[1::2], ids=named)
def test_ddp_with_adamw(exchange: Exchange, two: Ranks) -> None:
    check(two, exchange, True, "adamw")


@pytest.mark.parametrize(
    ("exchange", "wrapped", "optimizer"),
    [
        (DENSE, True, "momentum"),
        (ONEBIT, True, "momentum"),
        (ONEBIT, False, "adamw"),
        (TOPK, False, "adamw"),
    ],
    ids=lambda one: named(one) if isinstance(one, Exchange) else str(one),
)
def test_four_ranks_with_the_other_optimizer(
    exchange: Exchange, wrapped: bool, optimizer: str, four: Ranks
) -> None:
    check(four, exchange, wrapped, optimizer)
