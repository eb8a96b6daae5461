"""One rank is plain training, bit for bit: whatever the exchange, with or without a
group.
"""

from __future__ import annotations

import pytest

import gradwire as gw
from gradwire.contract import Exchange
from tests.runtime.given import SMALL
from tests.runtime.ranks import Ranks
from tests.runtime.training import CHOSEN, EXCHANGES, Net, ddp, digest, momentum, train


def bits(exchange: Exchange | None, wrapped: bool = False) -> str:
    """What a few steps end with; plainly where there is no exchange."""
    net = Net()
    model = ddp(net) if wrapped else net
    handle = None if exchange is None else gw.attach(model, exchange, options=SMALL)
    train(model, momentum(model.parameters()), 0, range(4))
    if handle is not None:
        stats = handle.stats()
        assert stats["residual_norm"] + stats["wire_bytes_per_step"] == 0
        handle.detach()
    return digest(net)


def in_a_group(rank: int, world: int) -> list[str]:
    attached = [bits(one, place % 2 == 0) for place, one in enumerate(EXCHANGES)]
    return [bits(None), *attached]


def test_one_process_without_a_group_trains_the_bits_of_plain_training() -> None:
    assert len({bits(exchange) for exchange in (None, *CHOSEN)}) == 1


@pytest.mark.slow
@pytest.mark.multi
def test_a_group_of_one_trains_the_bits_of_plain_training(one: Ranks) -> None:
    assert len(set(one.run(in_a_group)[0])) == 1
