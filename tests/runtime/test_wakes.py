"""A message wakes a lane up for what takes long to compute, and for nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.contract.verbs import AllReduce, Among, Steps
from gradwire.exchange.by_name import exchange_for
from gradwire.runtime.step.engine import Driver
from gradwire.runtime.step.task_graph import Task, TaskManager
from gradwire.runtime.step.wire import Circle, Routes
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
    return found, len(handle.synchroniser.messages)


@each("exchange", [DENSE, ONEBIT], ids=named)
def test_no_lane_is_woken_up_to_wait_for_the_network_or_to_scatter(
    exchange: Exchange, two: Ranks
) -> None:
    for found, num_messages in two.run(queued, exchange):
        assert num_messages >= 3
        computes = () if exchange is DENSE else ("gather", "encode", "merge", "decode")
        assert {name for name in found if found[name]} <= set(computes)
        if computes:
            assert found["gather"] == NUM_STEPS * num_messages


def communications(rank: int, world: int, exchange: Exchange) -> list[str]:
    net = Net()
    handle = gw.attach(net, exchange)
    train(net, momentum(net.parameters()), rank, [0])
    spans = [span.name for span in handle.trace().spans if span.lane == "communication"]
    handle.detach()
    return spans


def test_the_last_dense_message_tells_which_parameters_were_used(two: Ranks) -> None:
    """So a small model's step is one all-reduce; compressed messages can carry no count."""
    assert two.run(communications, DENSE) == [["AllReduce"]] * 2
    every = exchange_for(gw.compress.onebit())
    assert all("AllReduce" in names for names in two.run(communications, every))


class Over:
    """A channel, and a verb on it, that has ended when it begins."""

    def allreduce(self, tensors: list[torch.Tensor]) -> Over:
        return self

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


def test_what_goes_on_in_the_backward_pass_does_not_see_its_settings() -> None:
    seen: list[tuple[str, bool, bool, bool]] = []

    def text() -> Steps[None]:
        yield AllReduce(torch.empty(1, device="cpu"))
        device, mode = torch.empty(0).device.type, torch.is_inference_mode_enabled()
        seen.append((device, torch.is_autocast_enabled("cpu"), mode, torch.is_grad_enabled()))

    routes = Routes(["communication"])
    routes.circles[Among.RANKS] = Circle("", 0, 2, [Over()])
    manager = TaskManager([], observe=lambda *_: None, on_error=lambda *_: None)
    end = Task("end", lambda: None, num_blockers=1)
    driver = Driver(manager, routes, text(), 0, 0, 0, end, [])
    with torch.device("meta"), torch.autocast("cpu"), torch.inference_mode():
        driver.resume(None)
    assert end.done
    assert seen == [("cpu", False, False, False)]
