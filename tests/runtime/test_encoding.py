"""The start of a text in the thread of the backward pass: what is done, and what is left."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from gradwire.contract.trace.span import Span
from gradwire.contract.verbs import AllReduce, Among, Compute, Steps
from gradwire.runtime.failure.membership import ALONE
from gradwire.runtime.step.engine import Engine
from gradwire.runtime.step.wire import Circle


@pytest.fixture
def spans() -> list[Span]:
    """The spans of all that was done."""
    return []


@pytest.fixture
def engine(spans: list[Span]) -> Iterator[Engine]:
    made = Engine(ALONE, num_channels=1, timeout=timedelta(seconds=30), on_span=spans.append)
    yield made
    made.close()


def _text() -> Steps[Any]:
    def encode() -> tuple[str, bool, torch.device]:
        inside = torch.is_autocast_enabled("cpu")
        return threading.current_thread().name, inside, torch.empty(1).device

    gathered = yield Compute("gather", lambda: 1)
    encoded, counted = yield (Compute("encode", encode), Compute("count", lambda: gathered + 1))
    yield AllReduce(torch.zeros(counted))
    last = yield Compute("decode", lambda: threading.current_thread().name)
    return encoded, counted, last


class Held:
    """A channel whose all-reduce ends when its future does."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[None] = torch.futures.Future()

    def allreduce(self, tensors: list[torch.Tensor]) -> Held:
        return self

    def get_future(self) -> torch.futures.Future[None]:
        return self.future


def test_computations_before_the_first_transfer_are_done_at_once(
    engine: Engine, spans: list[Span]
) -> None:
    held = Held()
    engine.routes.circles[Among.RANKS] = Circle("", 0, 2, [held, held])
    engine.begin_step(3)
    with torch.device("meta"), torch.autocast("cpu"):
        end = engine.launch(0, "message 0", _text(), is_inline=True)
    seen = [(span.name, span.lane, span.step) for span in spans]
    assert seen == [(name, "backward", 3) for name in ("gather", "encode", "count")]
    held.future.set_result(None)
    engine.wait([end])
    here = threading.current_thread().name
    encoded, counted, last = end.result
    assert (encoded, counted) == ((here, False, torch.device("cpu")), 2)
    assert last != here, "what comes later is the compute lane's"
    assert [span.lane for span in spans[3:]] == ["communication", "compute"]


def test_somebody_may_look_at_all_objects_meanwhile(engine: Engine) -> None:
    """An attach in another thread does, and so do memory profilers."""
    looks: list[Any] = []

    def text() -> Steps[Any]:
        done = yield tuple(Compute("encode", lambda: looks.append(gc.get_objects())) for _ in "ab")
        return done

    end = engine.launch(0, "message 0", text(), is_inline=True)
    engine.wait([end])
    assert (end.result, len(looks)) == ((None, None), 2)
