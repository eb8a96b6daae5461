"""DDP models and plans whose gradients a device computes: the host's bits, in order.

The device is `late`. An overlapping plan does not overlap there, as its parameters are of a class
of their own; what it cuts and orders is the same. Of futures torch's own code waits, which knows no
streams of this device: what it does for others stands here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.planning.data.plan import Plan
from gradwire.runtime.ddp.comm_hook import DDPHooks
from tests.runtime import late
from tests.runtime.given import keywords
from tests.runtime.plans import drawn
from tests.runtime.ranks import Ranks
from tests.runtime.training import ONEBIT, TOPK

pytestmark = pytest.mark.multi

STEPS = 4
NUMEL = 300
SMALL_MB = 0.001


class Factor(nn.Module):
    """A layer that multiplies element by element, so that a device has the host's bits."""

    def __init__(self, last: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, last, NUMEL))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


class Chain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(Factor(1.5 + place) for place in range(3)))


class LateFuture(torch.futures.Future[Any]):
    """A future whose result is there when the stream that was current at ``set_result`` is."""

    set_behind: ClassVar[list[late.LateEvent]] = []

    def set_result(self, result: Any) -> None:
        self.set_behind.append(late.LATE.record(late.LATE.current_stream(late.DEVICE)))
        super().set_result(result)


def _end_backward(self: DDPHooks, real: Any = DDPHooks._end_backward) -> None:
    """Ends a pass as torch does, whose current stream waits for all futures then."""
    real(self)
    for event in LateFuture.set_behind:
        event.wait(late.LATE.current_stream(late.DEVICE))


@contextmanager
def futures() -> Iterator[None]:
    with (
        mock.patch.object(torch.futures, "Future", LateFuture),
        mock.patch.object(DDPHooks, "_end_backward", _end_backward),
    ):
        yield


class Run(NamedTuple):
    """What training left on one rank, and what was noted."""

    params: list[Tensor]
    stats: dict[str, Any]
    wrong: list[str]
    waits: list[str]


def train(
    rank: int, device: str, exchange: Any, *, under_ddp: bool = False, **settings: Any
) -> Run:
    noted = late.install()
    noted.has_network = settings.get("backend") == "nccl"
    model: nn.Module = Chain().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if under_ddp:
        model = DistributedDataParallel(model, init_sync=False, bucket_cap_mb=SMALL_MB)
    if isinstance(exchange, Plan):
        settings["optimizer"] = optimizer
    else:
        settings |= {"bucket_cap_mb": SMALL_MB, "compress_if": lambda name, param: True}
    handle = gw.attach(model, exchange, **keywords(**settings))
    for step in range(STEPS):
        if step <= 2 * under_ddp:  # DDP itself waits when it makes its buckets anew, in step 1
            noted.waits.clear()
        x = torch.linspace(-1, 1, NUMEL) * (1 + rank + step)
        given = x.to(device)
        optimizer.zero_grad()
        model(given).square().sum().backward()
        optimizer.step()
    waits = list(noted.waits)
    stats = handle.stats()
    handle.detach()
    params = [param.detach().cpu() for param in model.parameters()]
    return Run(params, stats, list(noted.wrong), waits)


def agrees(device: Run, host: Run, backend: str) -> None:
    assert not device.wrong, device.wrong[:3]
    pairs = zip(device.params, host.params, strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert device.stats["backend"]["between_hosts"] == backend
    assert (device.stats["pinned_bytes"] == 0) == (backend == "nccl")
    assert {*device.stats["encoded_on"]} == {"late:0"}


def with_ddp(rank: int, world: int, exchange: Any, backend: str) -> list[str]:
    host = train(rank, "cpu", exchange, under_ddp=True)
    with futures():
        device = train(rank, "late", exchange, under_ddp=True, backend=backend)
    agrees(device, host, backend)
    return device.waits


def by_plan(rank: int, world: int, seed: int, backend: str) -> list[str]:
    plan = drawn(seed, model=Chain())
    host = train(rank, "cpu", plan)
    device = train(rank, "late", plan, backend=backend)
    agrees(device, host, backend)
    assert (host.stats["overlapped_steps"] > 0) == plan.overlap_forward
    return device.waits


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("exchange", [ONEBIT, pytest.param(TOPK, marks=pytest.mark.slow)])
def test_ddp_makes_the_hosts_bits(exchange: Any, backend: str, late_two: Ranks) -> None:
    waits = late_two.run(with_ddp, exchange, backend)
    assert exchange == TOPK or waits == [[], []], "the host waited for a stream"


def unwaited(rank: int, world: int) -> None:
    assert train(rank, "late", ONEBIT, under_ddp=True).wrong, "nothing was found"


def test_a_future_that_nobody_waits_for_is_found(late_two: Ranks) -> None:
    late_two.run(unwaited)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_makes_the_hosts_bits(seed: int, backend: str, late_two: Ranks) -> None:
    assert late_two.run(by_plan, seed, backend) == [[], []], "the host waited for a stream"
