"""Rings with more ranks than chunks: a hop that moves nothing is no step at all."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.exchange import texts
from gradwire.local import drive
from gradwire.verbs import Compute, Recv, Send

RINGS = [gw.collective.ring(), gw.collective.casync_ring()]


def noted(text: Any, log: list[tuple[Any, ...]]) -> Generator[Any, Any, Any]:
    """The same text; notes every tuple of verbs."""
    value = None
    while True:
        try:
            asked = text.send(value)
        except StopIteration as stop:
            return stop.value
        if isinstance(asked, tuple):
            log.append(asked)
        value = yield asked


@pytest.mark.parametrize("collective", RINGS, ids=repr)
@pytest.mark.parametrize(("world", "numel"), [(2, 0), (5, 1), (4, 9), (3, 300)])
def test_every_hop_moves_something(collective: gw.Collective, world: int, numel: int) -> None:
    exchange = gw.pair(gw.compress.none(), collective)
    logs: list[list[tuple[Any, ...]]] = [[] for _ in range(world)]
    grads = [torch.full((numel,), float(rank)) for rank in range(world)]
    steps = [noted(t, log) for t, log in zip(texts(exchange, grads), logs, strict=True)]
    for mean_N, _, _ in drive(steps).results:
        assert mean_N.tolist() == [(world - 1) / 2] * numel
    hops = [hop for log in logs for hop in log]
    assert all(any(isinstance(verb, Send | Recv) for verb in hop) for hop in hops)
    beside = [verb for hop in hops for verb in hop if isinstance(verb, Compute)]
    assert all(verb.name == "decode" and verb.numel > 0 for verb in beside)
    # A chunk is sent W-1 times in each phase, and none is empty.
    num_chunks = min(world, -(-numel // 8))
    assert sum(isinstance(verb, Send) for hop in hops for verb in hop) == (
        2 * (world - 1) * num_chunks if numel < 300 else 2 * (world - 1) * world
    )
