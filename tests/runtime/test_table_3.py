"""HiPress, table 3: what is encoded and decoded beside no transfer, from the runtime's trace.

The simulator's is in ``planning/simulation/test_computes``. An encode or a decode is alone where no
communication of its rank is under way. gamma counts decodes, and merges but for that of the own
gradient, which decodes nothing. As in section 6.1 aggregators are workers: beta and gamma are at
most N.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from gradwire.collective.casync_ps import casync_ps
from gradwire.collective.casync_ring import casync_ring
from gradwire.compress.onebit import onebit
from gradwire.contract import Member
from gradwire.contract.collective import Collective
from gradwire.contract.spec import TensorSpec
from gradwire.contract.trace.span import Span
from gradwire.exchange.pair import Pair, pair
from gradwire.runtime.failure.membership import join
from gradwire.runtime.step.engine import Driver, Engine
from gradwire.runtime.step.task_graph import Task
from tests.planning.simulation.test_computes import CHUNK, computes
from tests.runtime.ranks import Ranks

PS, RING = casync_ps(room_bytes=0), casync_ring(half_bytes=10**9)
HALVES = casync_ring(half_bytes=0)


def alone(exchange: Pair, spans: Sequence[Span], world: int) -> tuple[float, float]:
    """beta and gamma of the slowest rank, in chunks of ``CHUNK``, from the spans of all ranks."""
    found = []
    for rank, own in enumerate(computes(exchange, world * CHUNK, world)):
        mine = [span for span in spans if span.rank == rank]
        wire = [span for span in mine if span.lane == "communication"]
        works = sorted((s for s in mine if s.lane == "compute"), key=lambda s: s.start_s)
        assert [span.name for span in works] == [one.name for one in own]
        counts = {"encode": 0.0, "merge": 0.0, "decode": 0.0}
        for span, one in zip(works, own, strict=True):
            is_beside = any(w.start_s < span.end_s and span.start_s < w.end_s for w in wire)
            counts[span.name] += 0 if is_beside else one.numel / CHUNK
        if world == 2 and exchange.collective == PS:  # by one all-to-all: the own one is merged too
            counts["merge"] -= 1
        found.append((counts["encode"], counts["merge"] + counts["decode"]))
    return max(beta for beta, _ in found), max(gamma for _, gamma in found)


def expected(collective: Collective, world: int) -> tuple[float, float]:
    """Table 3, or less: a server in rounds encodes two chunks and the mean alone, and decodes the
    last chunk that is pushed and the last that is pulled; a ring of halves half a chunk each."""
    if collective == HALVES:
        return 0.5, 0.5
    if collective == PS and world > 2:
        return min(2, world - 2) + 1, 2
    return world, world


def _together(then: Callable[..., None]) -> Callable[..., None]:
    """Has a transfer begin before what is computed beside it, and end behind it: as on a slow
    link, whatever the machine does meanwhile."""

    def held(driver: Driver, value: Callable[[], Any], works: list[Task], wire: list[Task]) -> None:
        begun, left = threading.Event(), threading.Semaphore(0)

        def behind(fn: Callable[[], Any]) -> Callable[[], Any]:
            def work() -> Any:
                assert begun.wait(60)
                result = fn()
                left.release()
                return result

            return work

        def around(fn: Callable[[], Any]) -> Callable[[], None]:
            def carry() -> None:
                begun.set()
                fn()
                assert all(left.acquire(timeout=60) for _ in works)

            return carry

        for task in works if wire else ():
            task.fn = behind(task.fn)
        for task in wire:
            task.fn = around(task.fn)
        then(driver, value, works, wire)

    return held


def traced(rank: int, world: int, collectives: Sequence[Collective]) -> list[list[Span]]:
    """Every collective's spans of one exchange in the runtime's engine."""
    then = Driver._then
    Driver._then = _together(then)  # type: ignore[method-assign]
    found: list[list[Span]] = [[] for _ in collectives]
    engine = Engine(
        join(None),
        num_channels=1,
        timeout=timedelta(seconds=60),
        on_span=lambda span: found[span.message].append(span),
    )
    try:
        for number, collective in enumerate(collectives):
            exchange, numel = pair(onebit(), collective), world * CHUNK
            state, grad_N = exchange.init(TensorSpec("", numel), world), torch.randn(numel)
            text = exchange.synchronise(Member(rank, world), state, grad_N, grad_N)
            engine.wait([engine.launch(number, "traced", text)])
    finally:
        engine.close()
        Driver._then = then  # type: ignore[method-assign]
    return found


def test_table_3_from_the_runtimes_trace(four: Ranks) -> None:
    collectives = (PS, RING, HALVES)
    every = four.run(traced, collectives)
    for number, collective in enumerate(collectives):
        spans = [span for own in every for span in own[number]]
        assert alone(pair(onebit(), collective), spans, 4) == expected(collective, 4)
