"""A small message wakes lanes up to send straight and to compute beside a transfer, and
for nothing else.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.contract.trace.span import Span
from gradwire.contract.verbs import Among, Broadcast, Compute, Steps
from gradwire.errors import RankFailed, RanksLost
from gradwire.exchange.by_name import exchange_for
from gradwire.runtime.engine import engine as engine_module
from gradwire.runtime.engine.engine import Driver, Engine, Launch
from gradwire.runtime.liveness.membership import ALONE
from gradwire.runtime.liveness.pulse import PATIENCE_S
from gradwire.runtime.transport.task_graph import Task, TaskManager
from gradwire.runtime.transport.wire import RankGroup, Routes
from tests.each import each
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, ONEBIT, SMALL_MB, Net, momentum, named, train

pytestmark = pytest.mark.multi
NUM_STEPS = 3


def queued(rank: int, world: int, exchange: Exchange) -> tuple[Counter[str], int]:
    """The tasks that went to a lane's thread, by name, and the messages of one step.

    A light task behind others that the lane is at wakes nobody, and is not counted.
    """
    found: Counter[str] = Counter()
    queue = TaskManager._queue

    def counting(manager: TaskManager, task: Task, lane: str) -> None:
        is_behind = lane in manager._busy or manager._ready[lane]
        found[task.name] += not (task.is_light and is_behind)
        queue(manager, task, lane)

    net = Net()
    handle = gw.attach(
        net, exchange, **keywords(bucket_cap_mb=SMALL_MB, compress_if=lambda *_: True)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskManager, "_queue", counting)
        train(net, momentum(net.parameters()), rank, range(NUM_STEPS))
    handle.detach()
    return found, len(handle._synchroniser.messages)


@each("exchange", [DENSE, ONEBIT], ids=named)
def test_small_messages_wake_lanes_to_send_alone(
    exchange: Exchange, two: Ranks
) -> None:
    """What is computed beside a transfer is done by the thread that sends."""
    for found, num_messages in two.run(queued, exchange):
        assert num_messages >= 3
        straight = ("AllReduce",) if exchange is DENSE else ("AllToAll", "AllGather")
        assert {name for name in found if found[name]} == {*straight}
        assert found[straight[-1]] == NUM_STEPS * num_messages


def communications(rank: int, world: int, exchange: Exchange) -> list[str]:
    net = Net()
    handle = gw.attach(net, exchange)
    num_before = len(handle.trace().spans)
    train(net, momentum(net.parameters()), rank, [0])
    spans = handle.trace().spans[num_before:]
    handle.detach()
    return [span.name for span in spans if span.lane == "communication"]


def test_the_last_dense_message_tells_which_parameters_were_used(two: Ranks) -> None:
    """So a small model's step is one all-reduce; compressed messages can carry no
    count.
    """
    assert two.run(communications, DENSE) == [["AllReduce"]] * 2
    every = exchange_for(gw.compress.onebit())
    assert all("AllReduce" in names for names in two.run(communications, every))


class Over:
    """A channel, and a verb on it, that has ended when it begins."""

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Over:
        return self

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


def test_what_goes_on_in_the_backward_pass_does_not_see_its_settings() -> None:
    seen: list[tuple[str, bool, bool, bool]] = []

    def steps() -> Steps[None]:
        yield Broadcast(0, torch.empty(1, device="cpu"))
        device, mode = torch.empty(0).device.type, torch.is_inference_mode_enabled()
        seen.append(
            (device, torch.is_autocast_enabled("cpu"), mode, torch.is_grad_enabled())
        )

    routes = Routes(["communication"])
    routes.groups[Among.RANKS] = RankGroup("", 0, 2, [Over()])
    manager = TaskManager([], observe=lambda *_: None, on_error=lambda *_: None)
    driver = Driver(manager, routes, lambda task: task, steps(), "message 0", 0, 0, 0)
    driver.turn.done = True
    with torch.device("meta"), torch.autocast("cpu"), torch.inference_mode():
        driver.resume(None)
    assert driver.end.done
    assert seen == [("cpu", False, False, False)]


# ---- The start of steps in the thread of the backward pass: what is done, and what is


@pytest.fixture
def spans() -> list[Span]:
    """The spans of all that was done."""
    return []


@pytest.fixture
def engine(spans: list[Span]) -> Iterator[Engine]:
    made = Engine(
        ALONE, num_channels=1, timeout=timedelta(seconds=30), on_span=spans.append
    )
    yield made
    made.close()


def _text() -> Steps[Any]:
    def encode() -> tuple[str, bool, torch.device]:
        inside = torch.is_autocast_enabled("cpu")
        return threading.current_thread().name, inside, torch.empty(1).device

    gathered = yield Compute("gather", lambda: 1)
    encoded, counted = yield (
        Compute("encode", encode),
        Compute("count", lambda: gathered + 1),
    )
    yield Broadcast(0, torch.zeros(counted))
    last = yield Compute("decode", lambda: threading.current_thread().name)
    return encoded, counted, last


class Held:
    """A channel whose broadcast ends when its future does."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[None] = torch.futures.Future()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Held:
        return self

    def get_future(self) -> torch.futures.Future[None]:
        return self.future


def test_computations_before_the_first_transfer_are_done_at_once(
    engine: Engine, spans: list[Span]
) -> None:
    held = Held()
    engine.routes.groups[Among.RANKS] = RankGroup("", 0, 2, [held, held])
    engine.begin_step(3)
    with torch.device("meta"), torch.autocast("cpu"):
        end = engine.launch(0, "message 0", _text(), Launch(is_inline=True))
    seen = [(span.name, span.lane, span.step) for span in spans]
    assert seen == [(name, "backward", 3) for name in ("gather", "encode", "count")]
    held.future.set_result(None)
    engine.wait([end])
    here = threading.current_thread().name
    encoded, counted, last = end.result
    assert (encoded, counted) == ((here, False, torch.device("cpu")), 2)
    assert last != here, "what comes later is the compute lane's"
    assert [span.lane for span in spans[3:]] == ["communication", "compute"]


def test_a_wait_beside_messages_goes_on_through_another_models_failure(
    engine: Engine,
) -> None:
    """Waits for messages end by it. Ranks that connect anew go on connecting."""

    def work() -> str:
        engine.interrupt(RanksLost("elsewhere"))
        time.sleep(1.0)  # whoever ends by it does so now
        return "connected"

    assert engine.meanwhile("connect", work) == "connected"


@each("is_mute", [True, False])
def test_work_has_more_than_the_time_out_while_the_store_answers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_mute: bool
) -> None:
    """It names then who did not come. A silent store names nobody."""
    go = threading.Event()
    lost = RankFailed("the store is lost")
    monkeypatch.setattr(engine_module, "EXTRA_S", 3600.0)
    monkeypatch.setattr(engine, "timeout", timedelta(seconds=0.1))
    monkeypatch.setattr(engine, "unreachable", lambda what, error: lost)
    mute_s = 2 * PATIENCE_S if is_mute else 0.0
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_pulse", SimpleNamespace(mute_s=mute_s))
        if is_mute:
            with pytest.raises(RankFailed, match="the store is lost"):
                engine.meanwhile("connect", lambda: go.wait(600))
        else:
            ending = threading.Timer(1.0, go.set)
            ending.start()
            assert engine.meanwhile("connect", lambda: go.wait(600))
    go.set()


def test_a_wait_beside_messages_ends_by_this_models_failure(engine: Engine) -> None:
    failing = threading.Timer(0.05, engine._fail, [RankFailed("lost")])
    failing.start()
    with pytest.raises(RankFailed, match="lost"):
        engine.meanwhile("connect", lambda: threading.Event().wait(60))


def test_somebody_may_look_at_all_objects_meanwhile(engine: Engine) -> None:
    """An attach in another thread does, and so do memory profilers."""
    looks: list[Any] = []

    def steps() -> Steps[Any]:
        done = yield tuple(
            Compute("encode", lambda: looks.append(gc.get_objects())) for _ in "ab"
        )
        return done

    end = engine.launch(0, "message 0", steps(), Launch(is_inline=True))
    engine.wait([end])
    assert (end.result, len(looks)) == ((None, None), 2)
