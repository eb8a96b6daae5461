"""DDP models whose gradients a device computes: the host's bits, in order.

The device is `late`. Of futures torch's own code waits, which knows no streams of this device: what
it does for others stands here.
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
from gradwire.runtime.ddp.comm_hook import DDPHooks
from tests.runtime import late
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks
from tests.runtime.test_devices import QUICK

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


def train(rank: int, device: str, **settings: Any) -> Run:
    noted = late.install()
    noted.has_network = settings.get("backend") == "nccl"
    inner = Chain().to(device)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    model = DistributedDataParallel(inner, init_sync=False, bucket_cap_mb=SMALL_MB)
    settings |= {"bucket_cap_mb": SMALL_MB, "compress_if": lambda name, param: True}
    handle = gw.attach(model, QUICK, **keywords(**settings))
    for step in range(STEPS):
        if step <= 2:  # DDP itself waits when it makes its buckets anew, in step 1
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


def with_ddp(rank: int, world: int) -> list[str]:
    """The streams that the host waited for, by either back end."""
    waits = []
    host = train(rank, "cpu")
    for backend in ("gloo", "nccl"):
        with futures():
            device = train(rank, "late", backend=backend)
        assert not device.wrong, device.wrong[:3]
        pairs = zip(device.params, host.params, strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
        assert device.stats["backend"]["between_hosts"] == backend
        assert (device.stats["pinned_bytes"] == 0) == (backend == "nccl")
        assert {*device.stats["encoded_on"]} == {"late:0"}
        waits += device.waits
    return waits


def test_ddp_makes_the_hosts_bits_and_waits_for_no_stream(late_two: Ranks) -> None:
    assert late_two.run(with_ddp) == [[], []]


def unwaited(rank: int, world: int) -> None:
    assert train(rank, "late").wrong, "nothing was found"


def test_a_future_that_nobody_waits_for_is_found(late_two: Ranks) -> None:
    late_two.run(unwaited)
