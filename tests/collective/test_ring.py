"""Rings with more ranks than chunks: a hop that moves nothing is no step at all."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

import gradwire as gw
from gradwire.compress.none import none
from gradwire.contract.verbs import Compute, Recv, Send, Steps, rewritten
from gradwire.exchange.by_name import steps_of_all
from gradwire.exchange.local import drive
from gradwire.exchange.without_data import wire_bytes
from gradwire_lab.collective.casync_ring import casync_ring, staggered
from tests.each import each

RINGS = [gw.collective.ring(), gw.collective.casync_ring()]


def noted(steps: Any, log: list[tuple[Any, ...]]) -> Steps[Any]:
    """The same steps; notes every tuple of verbs."""

    def each_tuple(asked: Any) -> Steps[Any]:
        if isinstance(asked, tuple):
            log.append(asked)
        return (yield asked)

    return rewritten(steps, each_tuple)


@each("collective", RINGS)
@each("world, numel", [(2, 0), (5, 1), (4, 9), (3, 300)])
def test_every_hop_moves_something(
    collective: gw.Collective, world: int, numel: int
) -> None:
    exchange = gw.pair(gw.compress.none(), collective)
    logs: list[list[tuple[Any, ...]]] = [[] for _ in range(world)]
    grads = [torch.full((numel,), float(rank)) for rank in range(world)]
    steps = [
        noted(t, log)
        for t, log in zip(steps_of_all(exchange, grads), logs, strict=True)
    ]
    for mean_N, _, _ in drive(steps).results:
        assert mean_N.tolist() == [(world - 1) / 2] * numel
    rows = [row for log in logs for row in log]
    assert all(rows)
    hops = [row for row in rows if any(isinstance(verb, Send | Recv) for verb in row)]
    assert all(
        verb.buf.numel()
        for hop in hops
        for verb in hop
        if isinstance(verb, Send | Recv)
    )
    computed = [verb for row in rows for verb in row if isinstance(verb, Compute)]
    assert all(verb.numel > 0 for verb in computed)
    beside = [verb for hop in hops for verb in hop if isinstance(verb, Compute)]
    assert all(verb.name == "decode" for verb in beside)
    # A chunk is sent W-1 times in each phase, and none is empty.
    num_chunks = min(world, -(-numel // 8))
    assert sum(isinstance(verb, Send) for hop in hops for verb in hop) == (
        2 * (world - 1) * num_chunks if numel < 300 else 2 * (world - 1) * world
    )


def test_large_messages_go_in_halves() -> None:
    """Chunks of 128 KiB go whole, and those of more in two parts, each with a state of
    its own.
    """
    exchange = gw.pair(none(), casync_ring())
    most = 2 * 32 * 1024
    assert len(exchange.init(gw.TensorSpec("", most), 2).inner) == 2
    assert len(exchange.init(gw.TensorSpec("", most + 8), 2).inner) == 4
    assert wire_bytes(exchange, gw.TensorSpec("", 2 * most), 2) == [2 * most * 4] * 2


def test_texts_side_by_side_are_one_tuple_apart() -> None:
    """The second is a tuple behind the first; empty tuples of both are no step; all
    end.
    """

    def steps(name: str, rows: int) -> Any:
        found: list[Any] = []
        for row in range(rows):
            found += yield (Compute(f"{name}{row}", lambda: None),) if row != 1 else ()
        return found

    def noted() -> Any:
        results = yield from staggered([steps("a", 2), steps("b", 3)])
        assert results == [["a0"], ["b0", "b2"]]

    both, seen = noted(), []
    answer: Any = None
    with suppress(StopIteration):
        while True:
            asked = both.send(answer)
            answer = tuple(verb.name for verb in asked)
            seen.append([*answer])
    assert seen == [["a0"], ["b0"], ["b2"]]
