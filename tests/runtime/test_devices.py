"""Gradients that a device computes are encoded there: the same bits as on the host, in order.

The device is `late`, on which a use before its event is noted. What a GPU itself does is not tested
by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.dsl.generated import Generated
from gradwire.errors import InvalidSetting
from gradwire.exchange.by_name import exchange_for
from gradwire.runtime.device.streams import SideStream, Staged, StepMarks, Streams
from gradwire.runtime.handle import Handle
from gradwire.runtime.step.synchroniser import Record
from tests.runtime import late
from tests.runtime.given import keywords
from tests.runtime.meshes import mesh
from tests.runtime.ranks import Ranks
from tests.runtime.training import CHOSEN, EXCHANGES, SMALL_MB, TOPK

pytestmark = pytest.mark.multi

SHAPES = ((60, 33), (7, 11), (5,), (40, 50))
STEPS = 3
LOSSLESS = exchange_for(gw.compress.lossless())


def halved(collective: Any) -> Exchange:
    """Of 16 bits, with feedback: what any compressor goes through, and few kernels."""
    return gw.with_error_feedback(gw.pair(gw.compress.cast16(), collective))


def _is_interpreted(exchange: Exchange) -> bool:
    """Whether CompLL's interpreter encodes it on this device, as slowly for one as for another."""
    return isinstance(getattr(getattr(exchange, "inner", exchange), "codec", None), Generated)


ps, circle = gw.collective.casync_ps, gw.collective.casync_ring
QUICK = halved(ps())
EVERY = [
    *(QUICK, *CHOSEN, LOSSLESS, exchange_for(gw.compress.threelc())),
    *(exchange for exchange in EXCHANGES if not _is_interpreted(exchange)),
    *(halved(ps(room_bytes=0)), halved(ps(partitions=1)), halved(ps(partitions=1, room_bytes=0))),
    *(halved(circle()), halved(circle(partitions=1)), halved(circle(half_bytes=0))),
]
"""An exchange for each way of a device's memory; two stand for all that are interpreted there."""
FEW = [QUICK, TOPK]


class Run(NamedTuple):
    """What a few steps left on one rank, and what was noted."""

    means: list[Tensor]
    stats: dict[str, Any]
    state: dict[str, Any]
    wrong: list[str]
    waits: list[str]
    num_pinned: list[int]


def layers(device: str) -> nn.ParameterList:
    return nn.ParameterList(torch.zeros(shape).to(device) for shape in SHAPES)


def backward(model: nn.ParameterList, rank: int, step: int, used: Sequence[int] = ()) -> None:
    """Gives layers their gradients; the last one's memory is read after it is there."""
    draw = torch.Generator().manual_seed(100 * rank + step)
    grads = [torch.randn(shape, generator=draw).to(model[0].device) for shape in SHAPES]
    of_input = torch.ones(SHAPES[3]).to(model[0].device).requires_grad_().flatten().tanh()
    chosen = used or (0, 1, 2)
    losses = [(model[place] * grads[place]).sum() for place in chosen]
    joined = (model[3].flatten() + of_input) * grads[3].flatten()
    (torch.stack(losses).sum() + joined.sum()).backward()  # type: ignore[no-untyped-call]


def run(
    rank: int,
    exchange: Any,
    device: str,
    use: Callable[[Handle], None] | None = None,
    *,
    has_network: bool = False,
    **how: Any,
) -> Run:
    noted = late.install()
    noted.has_network = has_network
    model = layers(device)
    settings = {"bucket_cap_mb": SMALL_MB, "compress_if": lambda name, param: True, **how}
    handle = gw.attach(model, exchange, **keywords(**settings))
    means: list[Tensor] = []
    num_pinned = []
    noted.waits.clear()
    waits: list[str] = []
    for step in range(STEPS):
        model.zero_grad()
        noted.waits.clear()
        used = (0, 1) if step == 1 and rank == 0 else ()
        backward(model, rank, step, used)
        waits += noted.waits
        num_pinned.append(noted.num_pinned)
        means += [param.grad.cpu() for param in model]
    if use is not None:
        use(handle)
    stats, state = handle.stats(), handle.state_dict()
    handle.detach()
    state["run"] = ""
    return Run(means, stats, state, list(noted.wrong), waits, num_pinned)


def leaving_out(rank: int, world: int, exchange: Any) -> list[str]:
    """What was noted where a parameter that was used is used by no rank for some steps."""
    noted = late.install()
    model = layers("late")
    handle = gw.attach(
        model, exchange, **keywords(bucket_cap_mb=SMALL_MB, compress_if=lambda name, param: True)
    )
    for step in range(4):
        model.zero_grad()
        backward(model, rank, step, (0, 1) if step else ())
    handle.detach()
    return list(noted.wrong)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, list):
        return all(same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def compare(rank: int, world: int, exchanges: Sequence[Exchange], on_hosts: Any = None) -> None:
    how = {} if on_hosts is None else {"mesh": on_hosts()}
    for exchange in exchanges:
        host = run(rank, exchange, "cpu", **how)
        device = run(rank, exchange, "late", checksums=True, **how)
        assert not device.wrong, (exchange, device.wrong[:3])
        pairs = zip(device.means, host.means, strict=True)
        assert all(torch.equal(*pair) for pair in pairs), exchange
        assert same(device.state, host.state), exchange
        where = {"cpu"} if exchange.declared.host_only else {"late:0"}
        assert {*device.stats["encoded_on"]} == where
        assert host.stats["to_host_bytes_per_step"] == host.stats["pinned_bytes"] == 0


def test_a_device_makes_the_hosts_bits(late_two: Ranks) -> None:
    late_two.run(compare, FEW)


@pytest.mark.slow
def test_every_exchange_makes_the_hosts_bits(late_two: Ranks) -> None:
    late_two.run(compare, EVERY)


def _at_once(self: SideStream, marks: Any) -> Any:
    return nullcontext()


BROKEN: dict[str, Any] = {
    "gathers at once": lambda: mock.patch.object(SideStream, "behind", _at_once),
    "sends at once": lambda: mock.patch.object(Staged, "wait"),
    "hands means on at once": lambda: mock.patch.object(Streams, "follow"),
    "writes shared memory within the backward pass": lambda: mock.patch.object(
        StepMarks, "_now", return_value=[]
    ),
    "receives into memory on its way": lambda: mock.patch.object(Staged, "back", _back_later),
}
"""Runtimes that leave one wait out."""


def _back_later(self: Staged) -> None:
    """The next verb's arrivals are written where these are read from."""
    with late.LATE.use(late.LATE.new_stream(late.DEVICE)):
        for tensor, room in self.landing:
            tensor.copy_(room, non_blocking=True)


def break_each(rank: int, world: int) -> list[str]:
    """The broken runtimes of which nothing was found."""
    sound, missed = run(rank, QUICK, "late"), []
    assert not sound.wrong
    for name, breaking in BROKEN.items():
        with breaking():
            broken = run(rank, QUICK, "late")
        if not broken.wrong and same(broken.means, sound.means):
            missed.append(name)
    return missed


def test_a_wait_left_out_is_found(late_two: Ranks) -> None:
    assert late_two.run(break_each) == [[], []]


def counted(rank: int, world: int, exchange: Any) -> Run:
    return run(rank, exchange, "late")


def test_payloads_alone_are_copied_and_nobody_is_waited_for(late_two: Ranks) -> None:
    runs = late_two.run(counted, QUICK)
    report_bytes = len(Record(used=bytes(len(SHAPES))).packed())  # it comes from host memory
    for one in runs:
        copied_bytes = one.stats["to_host_bytes_per_step"]
        assert copied_bytes + report_bytes == one.stats["wire_bytes_per_step"]
        assert one.waits == [], "the host waited for a stream"
        assert len(set(one.num_pinned)) == 1, "memory is pinned again"
        assert one.stats["pinned_bytes"] > 0
    ways = ("to_host_bytes_per_step", "to_device_bytes_per_step")
    there, back = (sum(one.stats[way] for one in runs) for way in ways)
    assert there == back, "each byte that is sent arrives at one rank"


def test_messages_that_no_rank_uses_are_behind_the_step_before(late_two: Ranks) -> None:
    assert late_two.run(leaving_out, TOPK) == [[], []]


def test_what_is_encoded_on_the_host_is_copied_whole(late_two: Ranks) -> None:
    whole_bytes = sum(torch.Size(shape).numel() for shape in SHAPES) * torch.float32.itemsize
    for one in late_two.run(counted, LOSSLESS):
        assert one.stats["encoded_on"] == {"cpu": one.stats["messages"]}
        assert one.stats["to_host_bytes_per_step"] == whole_bytes
        assert one.stats["to_device_bytes_per_step"] == whole_bytes
        assert one.stats["pinned_bytes"] == 0


def captured(rank: int, world: int) -> None:
    device = late.install()
    device.is_recording = True
    with pytest.raises(InvalidSetting, match="CUDA graph is being captured"):
        Streams().mark(late.DEVICE)


def test_a_graph_that_holds_a_backward_pass_is_refused(late_two: Ranks) -> None:
    late_two.run(captured)


@pytest.mark.slow
def test_two_levels_make_the_hosts_bits() -> None:
    ranks = Ranks(4)
    try:
        ranks.run(compare, FEW, mesh)
    finally:
        ranks.close()
