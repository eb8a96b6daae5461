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
from gradwire.contract.verbs import AllReduce, Compute, Steps
from gradwire.runtime.failure.membership import ALONE
from gradwire.runtime.step.encoding import begun
from gradwire.runtime.step.engine import Engine


@pytest.fixture
def spans() -> list[Span]:
    """The spans of all that was done."""
    return []


@pytest.fixture
def engine(spans: list[Span]) -> Iterator[Engine]:
    made = Engine(ALONE, num_channels=1, timeout=timedelta(seconds=30), on_span=spans.append)
    yield made
    made.close()


def _text(fails: bool = False) -> Steps[Any]:
    def encode() -> tuple[str, bool, torch.device]:
        if fails:
            raise ValueError("no such block")
        inside = torch.is_autocast_enabled("cpu")
        return threading.current_thread().name, inside, torch.empty(1).device

    gathered = yield Compute("gather", lambda: 1)
    encoded, counted = yield (Compute("encode", encode), Compute("count", lambda: gathered + 1))
    total = yield AllReduce(torch.zeros(counted))
    last = yield Compute("decode", lambda: total)
    return encoded, counted, last


def test_computations_before_the_first_transfer_are_done_at_once(
    engine: Engine, spans: list[Span]
) -> None:
    with torch.device("meta"), torch.autocast("cpu"):
        rest = begun(engine, 3, 0, _text())
    seen = [(span.name, span.lane, span.step) for span in spans]
    assert seen == [(name, "backward", 3) for name in ("gather", "encode", "count")]
    assert isinstance(rest.send(None), AllReduce)
    decode = rest.send("the sum")
    assert isinstance(decode, Compute)
    with pytest.raises(StopIteration) as ended:
        rest.send(decode.fn())
    here = threading.current_thread().name, False, torch.device("cpu")
    assert ended.value.value == (here, 2, "the sum")
    assert len(spans) == 3, "what comes later is the engine's"


def test_a_text_without_transfers_has_ended(engine: Engine) -> None:
    def alone() -> Steps[int]:
        return (yield Compute("decode", lambda: 7))

    with pytest.raises(StopIteration) as ended:
        begun(engine, 0, 0, alone()).send(None)
    assert ended.value.value == 7


def test_an_error_ends_the_run_and_is_raised(engine: Engine) -> None:
    with pytest.raises(ValueError, match="no such block"):
        begun(engine, 0, 0, _text(fails=True))
    with pytest.raises(ValueError, match="no such block"):
        engine.check()


def test_somebody_may_look_at_all_objects_meanwhile(engine: Engine) -> None:
    """An attach in another thread does, and so do memory profilers."""
    looks: list[Any] = []

    def text() -> Steps[Any]:
        done = yield tuple(Compute("encode", lambda: looks.append(gc.get_objects())) for _ in "ab")
        return done

    with pytest.raises(StopIteration) as ended:
        begun(engine, 3, 0, text()).send(None)
    assert (ended.value.value, len(looks)) == ((None, None), 2)
