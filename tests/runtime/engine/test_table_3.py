"""HiPress, table 3: what is encoded and decoded beside a transfer, from the runtime's
trace.

``planning/simulation/test_computes`` has the table's counts of what steps compute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from gradwire.collective.casync_ps import casync_ps
from gradwire.compress.onebit import onebit
from gradwire.contract import Member
from gradwire.contract.collective import Collective
from gradwire.contract.spec import TensorSpec
from gradwire.contract.trace.span import Span
from gradwire.contract.verbs import AllReduce, Compute, Steps
from gradwire.exchange.pair import pair
from gradwire.runtime.engine.engine import Driver, Engine
from gradwire.runtime.liveness.membership import join
from gradwire.runtime.transport.task_graph import Task
from gradwire_lab.collective.casync_ring import casync_ring
from tests.planning.simulation.test_computes import CHUNK, computes
from tests.runtime.ranks import Ranks

COLLECTIVES = (
    casync_ps(room_bytes=0),
    casync_ring(half_bytes=10**9),
    casync_ring(half_bytes=0),
)


def _together(then: Callable[..., None]) -> Callable[..., None]:
    """Has a transfer begin before what is computed beside it, and end behind it: as on
    a slow link, whatever the machine does meanwhile.
    """

    def held(
        driver: Driver,
        value: Callable[[], Any],
        works: list[Task],
        wire: list[Task],
        in_slots: Sequence[Task] = (),
    ) -> None:
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
        then(driver, value, works, wire, in_slots)

    return held


def _engine(on_span: Callable[[Span], None]) -> Engine:
    timeout = timedelta(seconds=60)
    return Engine(join(None), num_channels=1, timeout=timeout, on_span=on_span)


def traced(
    rank: int, world: int, collectives: Sequence[Collective]
) -> list[list[Span]]:
    """Every collective's spans of one exchange in the runtime's engine."""
    then = Driver._then
    Driver._then = _together(then)  # type: ignore[method-assign]
    found: list[list[Span]] = [[] for _ in collectives]
    engine = _engine(lambda span: found[span.message].append(span))
    try:
        for number, collective in enumerate(collectives):
            exchange, numel = pair(onebit(), collective), world * CHUNK
            state, grad_N = (
                exchange.init(TensorSpec("", numel), world),
                torch.randn(numel),
            )
            steps = exchange.synchronise(Member(rank, world), state, grad_N, grad_N)
            engine.wait([engine.launch(number, "traced", steps)])
    finally:
        engine.close()
        Driver._then = then  # type: ignore[method-assign]
    return found


def test_what_a_text_computes_beside_a_transfer_is_computed_beside_it(
    four: Ranks,
) -> None:
    every = four.run(traced, COLLECTIVES)
    for number, collective in enumerate(COLLECTIVES):
        of_ranks = computes(pair(onebit(), collective), 4 * CHUNK, 4)
        assert any(one.is_beside for own in of_ranks for one in own)
        for rank, own in enumerate(of_ranks):
            spans = every[rank][number]
            wire = [span for span in spans if span.lane == "communication"]
            works = sorted(
                (s for s in spans if s.lane == "compute"), key=lambda s: s.start_s
            )
            beside = [
                any(w.start_s < s.end_s and s.start_s < w.end_s for w in wire)
                for s in works
            ]
            found = [(span.name, one) for span, one in zip(works, beside, strict=True)]
            assert found == [(one.name, one.is_beside) for one in own]


def meanwhile(rank: int, world: int) -> None:
    """The first message's transfer ends only once the second message was encoded."""
    encoded, then = threading.Event(), Driver._then

    def waiting(fn: Callable[[], Any]) -> Callable[[], None]:
        def carry() -> None:
            assert encoded.wait(60)
            fn()

        return carry

    def held(
        driver: Driver,
        value: Callable[[], Any],
        works: list[Task],
        wire: list[Task],
        in_slots: Sequence[Task] = (),
    ) -> None:
        for task in wire if driver.index == 0 else ():
            task.begin, task.fn = None, waiting(task.fn)
        then(driver, value, works, wire, in_slots)

    def steps(encode: Callable[[], None]) -> Steps[None]:
        yield Compute("encode", encode, 4)
        yield AllReduce(torch.ones(4))

    Driver._then = held  # type: ignore[method-assign]
    engine = _engine(lambda span: None)
    try:
        works = enumerate((lambda: None, encoded.set))
        engine.wait(
            [engine.launch(number, "held", steps(work)) for number, work in works]
        )
    finally:
        engine.close()
        Driver._then = then  # type: ignore[method-assign]


def test_a_message_is_encoded_while_another_is_on_its_way(two: Ranks) -> None:
    two.run(meanwhile)
