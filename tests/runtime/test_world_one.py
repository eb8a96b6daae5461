"""One rank is plain training, bit for bit: whatever the exchange, with or without a group."""

from __future__ import annotations

import pytest

import gradwire as gw
from gradwire.contract import Exchange
from tests.runtime.given import SMALL
from tests.runtime.ranks import Ranks
from tests.runtime.training import EXCHANGES, OPTIMIZERS, Net, ddp, digest, named, train

pytestmark = pytest.mark.slow

NUM_STEPS = 6


def plain(optimizer: str) -> str:
    net = Net()
    train(net, OPTIMIZERS[optimizer](net.parameters()), 0, range(NUM_STEPS))
    return digest(net)


def attached(exchange: Exchange, optimizer: str, wrapped: bool) -> tuple[str, float]:
    net = Net()
    model = ddp(net) if wrapped else net
    handle = gw.attach(model, exchange, options=SMALL)
    train(model, OPTIMIZERS[optimizer](model.parameters()), 0, range(NUM_STEPS))
    stats = handle.stats()
    handle.detach()
    return digest(net), stats["residual_norm"] + stats["wire_bytes_per_step"]


def in_a_group(rank: int, world: int, exchange: Exchange, optimizer: str) -> list[object]:
    return [
        plain(optimizer),
        attached(exchange, optimizer, wrapped=False),
        attached(exchange, optimizer, wrapped=True),
    ]


@pytest.mark.parametrize("exchange", EXCHANGES, ids=named)
def test_without_a_process_group(exchange: Exchange) -> None:
    optimizer = tuple(OPTIMIZERS)[EXCHANGES.index(exchange) % len(OPTIMIZERS)]
    assert attached(exchange, optimizer, wrapped=False) == (plain(optimizer), 0.0)


@pytest.mark.multi
@pytest.mark.parametrize("exchange", EXCHANGES, ids=named)
def test_in_a_group_of_one(exchange: Exchange, one: Ranks) -> None:
    bits, module, wrapped = one.run(in_a_group, exchange, "momentum")[0]
    assert module == (bits, 0.0)
    assert wrapped == (bits, 0.0)
