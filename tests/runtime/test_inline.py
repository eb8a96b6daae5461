"""The start of a text in the thread of the backward pass: what is done, and what is left."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from gradwire.runtime.inline import begun
from gradwire.runtime.lanes import Task
from gradwire.verbs import AllReduce, Compute, Steps


class Engine:
    """What of an engine a text's start uses."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str | None]] = []
        self.failed: list[BaseException] = []

    def _observe(self, task: Task, start_s: float, end_s: float) -> None:
        self.seen.append((task.name, task.lane))

    def _task_failed(self, task: Task, error: BaseException) -> None:
        self.failed.append(error)


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


def test_computations_before_the_first_transfer_are_done_at_once() -> None:
    engine = Engine()
    with torch.device("meta"), torch.autocast("cpu"):
        rest = begun(engine, 3, 0, _text())  # type: ignore[arg-type]
    assert engine.seen == [(name, "backward") for name in ("gather", "encode", "count")]
    assert isinstance(rest.send(None), AllReduce)
    decode = rest.send("the sum")
    assert isinstance(decode, Compute)
    with pytest.raises(StopIteration) as ended:
        rest.send(decode.fn())
    here = threading.current_thread().name, False, torch.device("cpu")
    assert ended.value.value == (here, 2, "the sum")
    assert len(engine.seen) == 3, "what comes later is the engine's"


def test_a_text_without_transfers_has_ended() -> None:
    def alone() -> Steps[int]:
        return (yield Compute("decode", lambda: 7))

    with pytest.raises(StopIteration) as ended:
        begun(Engine(), 0, 0, alone()).send(None)  # type: ignore[arg-type]
    assert ended.value.value == 7


def test_an_error_ends_the_run_and_is_raised() -> None:
    engine = Engine()
    with pytest.raises(ValueError, match="no such block"):
        begun(engine, 0, 0, _text(fails=True))  # type: ignore[arg-type]
    assert [str(error) for error in engine.failed] == ["no such block"]
