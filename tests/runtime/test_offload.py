"""What a plan has encoded early is, of a device's gradients, encoded by the host: the same bits.

The device is `late`, on which a use before its event is noted, and a copy made as late as may be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.compress.selective import selective
from gradwire.compress.selective.mixed import Mixed
from gradwire.data.plan import Chunk, ExchangeSetting, Plan, PlannedMessage
from gradwire.errors import InvalidSetting
from gradwire.runtime.offload import Offload
from gradwire.runtime.streams import SideStream
from tests.runtime import late
from tests.runtime.ranks import Ranks
from tests.runtime.test_devices import SHAPES, backward, layers, same

pytestmark = pytest.mark.multi

STEPS = 4
FLOAT_BYTES, ENTRY_BYTES = 4, 8
EARLY = {"0": 60 * 33, "3": 40 * 50}
"""The elements of the tensors that are encoded early; "1" is inline, and "2" travels dense."""


def plan_of(sparsifier: str = "dgc", *, feedback: bool = True, early: bool = True) -> Plan:
    """Two messages: of a dense tensor and an early one, of an inline tensor and an early one."""

    def chunks(*names: str) -> tuple[Chunk, ...]:
        numels = (torch.Size(SHAPES[int(name)]).numel() for name in names)
        pairs = zip(names, numels, strict=True)
        return tuple(Chunk(tensor=name, start=0, stop=numel) for name, numel in pairs)

    def setting(num_dense: int) -> ExchangeSetting:
        settings = {"sparsifier": sparsifier, "density": 0.05, "num_dense": num_dense}
        return ExchangeSetting(compressor="selective", settings=settings, error_feedback=feedback)

    last, first = ("3",), ("0",)
    where = ({"early": last}, {"inline": ("1",), "early": first})
    if not early:
        where = ({"inline": last}, {"inline": ("1", *first)})
    messages = (
        PlannedMessage(chunks=chunks("3", "2"), exchange="with dense", **where[0]),
        PlannedMessage(chunks=chunks("1", "0"), exchange="sparse", **where[1]),
    )
    exchanges = {"with dense": setting(1), "sparse": setting(0)}
    return Plan(planner="by hand", model="it", messages=messages, exchanges=exchanges)


class Run(NamedTuple):
    """What some steps left on one rank, and what was noted of the device."""

    means: list[Tensor]
    stats: dict[str, Any]
    state: dict[str, Any]
    wrong: list[str]
    waits: list[str]
    pinned: list[int]
    lanes: dict[str, str]


def run(
    rank: int,
    plan: Plan,
    device: str,
    *,
    seed: int | None = None,
    steps: Sequence[int] = range(STEPS),
    state: dict[str, Any] | None = None,
    **how: Any,
) -> Run:
    noted = late.install()
    noted.reset(seed)
    model = layers(device)
    handle = gw.attach(model, plan, **how)
    if state is not None:
        handle.load_state_dict(state)
    means: list[Tensor] = []
    waits: list[str] = []
    pinned = []
    for step in steps:
        model.zero_grad()
        noted.waits.clear()
        # In one step each rank leaves an early tensor out.
        used = ((1, 2), (0, 1))[rank] if step == 1 else ()
        backward(model, rank, step, used)
        waits += noted.waits
        pinned.append(noted.num_pinned)
        means += [param.grad.cpu() for param in model]
    stats, found = handle.stats(), handle.state_dict()
    found["run"] = ""
    spans = handle.trace().spans
    lanes = {span.name: span.lane for span in spans if span.name.startswith(("encode ", "copy "))}
    threads = {thread.name for thread in threading.enumerate()}
    assert ("gradwire offload" in threads) == (device == "late" and "encode 0" in lanes.keys())
    handle.detach()
    return Run(means, stats, found, list(noted.wrong), waits, pinned, lanes)


@pytest.fixture(scope="module")
def late_two() -> Iterator[Ranks]:
    """Ranks of their own, as the device stays in their processes."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def compare(rank: int, world: int, plan: Plan, seeds: Sequence[int | None]) -> None:
    host = run(rank, plan, "cpu")
    assert host.stats["offloaded"] == {"tensors": 0, "bytes_per_step": 0}
    for seed in seeds:
        device = run(rank, plan, "late", seed=seed)
        assert device.wrong == []
        assert True
        assert same(device.means, host.means)
        assert same(device.state, host.state)
        assert device.stats["encoded_on"] == {"late:0": 2}


@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "none"])
@pytest.mark.parametrize("sparsifier", ["dgc", "topk", "redsync"])
def test_the_host_makes_the_devices_bits(sparsifier: str, feedback: bool, late_two: Ranks) -> None:
    plan = plan_of(sparsifier, feedback=feedback)
    late_two.run(compare, plan, (None, 0, 1, 2) if sparsifier == "topk" else (None,))
