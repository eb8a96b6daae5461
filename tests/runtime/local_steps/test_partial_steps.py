"""Local steps with a quorum, on real ranks."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
from torch.optim import SGD

import gradwire as gw
from tests.runtime.ranks import Ranks
from tests.runtime.training import Net, adamw, digest, train

PLAIN = partial(SGD, lr=1.0)


def prepared(**settings: Any) -> tuple[Net, Any, Any]:
    net = Net(0)
    optimizer = adamw(net.parameters())
    settings = {"every": 4, "quorum": 1, "outer": PLAIN, "grace": 0.0, **settings}
    exchange = settings.pop("exchange", "none")
    return net, optimizer, gw.local_steps(net, optimizer, exchange, **settings)


def ended_apart(rank: int, world: int) -> tuple[str, str, int, int, list[str]]:
    net, optimizer, handle = prepared()
    train(net, optimizer, rank, range(10 if rank else 30))
    handle.end_period()
    ends = digest(net), digest(handle.anchors().values())
    figures = handle.step, handle.steps_of_all
    handle.detach()
    names = [thread.name for thread in threading.enumerate()]
    return (*ends, *figures, [name for name in names if "rounds" in name])


@pytest.mark.multi
def test_ranks_of_other_lengths_end_with_the_same_bits(two: Ranks) -> None:
    first, second = two.run(ended_apart)
    assert first[0] == second[0] == first[1] == second[1]
    assert (first[2], second[2]) == (30, 10)
    assert first[3] == second[3] == 40
    assert first[4] == second[4] == []
