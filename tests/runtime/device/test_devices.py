"""Gradients that a device computes are encoded there: the same bits as on the host, in
order.

The device is `late`, on which a use before its event is noted. What a GPU itself does
is not tested by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.dsl.generated import Generated
from gradwire.errors import InvalidSetting
from gradwire.exchange.by_name import exchange_for
from gradwire.planning.data.plan import Plan
from gradwire.runtime.ddp.comm_hook import DDPHooks
from gradwire.runtime.device.streams import SideStream, Staged, StepEvents, Streams
from gradwire.runtime.handle import Handle
from gradwire.runtime.step.report import Record
from tests.each import sampled
from tests.runtime.device import late
from tests.runtime.given import keywords
from tests.runtime.meshes import mesh
from tests.runtime.ranks import Ranks
from tests.runtime.training import EXCHANGES, ONEBIT, SMALL_MB, TOPK, everything

pytestmark = pytest.mark.multi

SHAPES = ((60, 33), (7, 11), (5,), (40, 50))
STEPS = 3
LOSSLESS = exchange_for(gw.compress.lossless())


def halved(collective: Any) -> Exchange:
    """Of 16 bits, with feedback: what any compressor goes through, and few kernels."""
    return gw.with_error_feedback(gw.pair(gw.compress.cast16(), collective))


def _codec(exchange: Exchange) -> Any:
    inner = getattr(exchange, "inner", exchange)
    return getattr(inner, "codec", inner)


ps, by_ring, ring = (
    gw.collective.casync_ps,
    gw.collective.casync_ring,
    gw.collective.ring,
)
QUICK = halved(ps())
FIRST = {type(_codec(one)): one for one in reversed(EXCHANGES)}
EVERY = [
    *(QUICK, ONEBIT, exchange_for(gw.compress.threelc())),
    *(one for kind, one in FIRST.items() if not issubclass(kind, Generated)),
    *(
        halved(ps(room_bytes=0)),
        halved(ps(partitions=1)),
        halved(ps(partitions=1, room_bytes=0)),
    ),
    *(halved(by_ring()), halved(by_ring(partitions=1)), halved(by_ring(half_bytes=0))),
    *(
        halved(ring()),
        gw.with_error_feedback(gw.pair(gw.compress.topk(density=0.3), ps())),
    ),
]
"""An exchange of each compressor, and one for each way of verbs; two stand for all that
CompLL's interpreter encodes on this device, as slowly for one as for another.
"""
FEW = [QUICK, TOPK]


class Run(NamedTuple):
    """What a few steps left on one rank, and what was noted."""

    means: list[Tensor]
    stats: dict[str, Any]
    state: dict[str, Any]
    wrong: list[str]
    waits: list[str]
    num_pinned: list[int]
    lanes: dict[str, str]
    """The lanes of encodes of single tensors, and of their copies, by the span's
    name.
    """


def layers(device: str) -> nn.ParameterList:
    return nn.ParameterList(torch.zeros(shape).to(device) for shape in SHAPES)


def backward(
    model: nn.ParameterList, rank: int, step: int, used: Sequence[int] = ()
) -> None:
    """Gives layers their gradients; the last one's memory is read after it is there."""
    draw = torch.Generator().manual_seed(100 * rank + step)
    grads = [torch.randn(shape, generator=draw).to(model[0].device) for shape in SHAPES]
    of_input = (
        torch.ones(SHAPES[3]).to(model[0].device).requires_grad_().flatten().tanh()
    )
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
    seed: int | None = None,
    used: Mapping[int, Sequence[int]] = MappingProxyType({0: (0, 1)}),
    steps: Sequence[int] = range(STEPS),
    state: dict[str, Any] | None = None,
    has_network: bool = False,
    needs_pinned: bool = False,
    **how: Any,
) -> Run:
    """Training of some steps, in the second of which ranks leave out layers that they
    have not ``used``; from a ``state`` on, if there is one.
    """
    noted = late.install()
    noted.reset(seed)
    noted.has_network, noted.needs_pinned = has_network, needs_pinned
    model = layers(device)
    by_size = {"bucket_cap_mb": SMALL_MB, "compress_if": everything}
    settings = how if isinstance(exchange, Plan) else {**by_size, **how}
    handle = gw.attach(model, exchange, **keywords(**settings))
    if state is not None:
        handle.load_state_dict(state)
    means: list[Tensor] = []
    num_pinned, waits = list[int](), list[str]()
    for step in steps:
        model.zero_grad()
        noted.waits.clear()
        backward(model, rank, step, used.get(rank, ()) if step == 1 else ())
        waits += noted.waits
        num_pinned.append(noted.num_pinned)
        means += [param.grad.cpu() for param in model]
    if use is not None:
        use(handle)
    stats, kept = handle.stats(), handle.state_dict()
    spans = handle.trace().spans
    lanes = {
        span.name: span.lane
        for span in spans
        if span.name.startswith(("encode ", "copy "))
    }
    handle.detach()
    kept["run"] = ""
    return Run(means, stats, kept, list(noted.wrong), waits, num_pinned, lanes)


def leaving_out(rank: int, world: int, exchange: Any) -> list[str]:
    """What was noted where a parameter that was used is used by no rank for some
    steps.
    """
    noted = late.install()
    model = layers("late")
    handle = gw.attach(
        model, exchange, **keywords(bucket_cap_mb=SMALL_MB, compress_if=everything)
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
        return one.keys() == other.keys() and all(
            same(one[key], other[key]) for key in one
        )
    return bool(one == other)


def agrees(device: Run, host: Run, exchange: Any) -> None:
    assert not device.wrong, (exchange, device.wrong[:3])
    assert differences(device.means, host.means) == [], exchange
    assert same(device.state, host.state), exchange


def differences(means: list[Tensor], wanted: list[Tensor]) -> list[str]:
    """Where means differ, and by what: it says which copy nobody waited for."""
    found = []
    for at, (mean, other) in enumerate(zip(means, wanted, strict=True)):
        step, layer = divmod(at, len(SHAPES))
        places = (mean != other).flatten().nonzero().flatten()
        if mean.shape != other.shape or len(places):
            values = mean.flatten()[places[:4]].tolist()
            others = other.flatten()[places[:4]].tolist()
            found.append(
                f"step {step}, layer {layer}: {len(places)} elements from "
                f"{places[:4].tolist()} on, {values} for {others}"
            )
    return found


def compare(
    rank: int,
    world: int,
    exchanges: Sequence[Exchange],
    num_steps: int,
    on_hosts: Any = None,
) -> None:
    how: dict[str, Any] = {"steps": range(num_steps)}
    how |= {} if on_hosts is None else {"mesh": on_hosts()}
    for exchange in exchanges:
        host = run(rank, exchange, "cpu", **how)
        device = run(rank, exchange, "late", checksums=True, **how)
        agrees(device, host, exchange)
        where = {"cpu"} if exchange.declared.host_only else {"late:0"}
        assert {*device.stats["encoded_on"]} == where
        assert host.stats["to_host_bytes_per_step"] == host.stats["pinned_bytes"] == 0


def test_a_device_makes_the_hosts_bits(late_two: Ranks) -> None:
    late_two.run(compare, FEW, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [0, pytest.param(1, marks=pytest.mark.nightly)], ids=["day", "night"]
)
def test_every_exchange_makes_the_hosts_bits(first: int, late_two: Ranks) -> None:
    """Every other one by day."""
    late_two.run(compare, EVERY[first::2], 2)


def _at_once(self: SideStream, events: Any) -> Any:
    return nullcontext()


BROKEN: dict[str, Any] = {
    "gathers at once": lambda: mock.patch.object(SideStream, "behind", _at_once),
    "sends at once": lambda: mock.patch.object(Staged, "wait"),
    "hands means on at once": lambda: mock.patch.object(Streams, "follow"),
    "writes shared memory within the backward pass": lambda: mock.patch.object(
        StepEvents, "_now", return_value=[]
    ),
    "receives into memory on its way": lambda: mock.patch.object(
        Staged, "back", _back_later
    ),
}
"""Runtimes that leave one wait out."""


def _back_later(self: Staged) -> None:
    """The next verb's arrivals are written where these are read from."""
    with late.LATE.use(late.LATE.new_stream(late.DEVICE)):
        for tensor, room in self.landing:
            tensor.copy_(room, non_blocking=True)


def break_each(rank: int, world: int, names: list[str]) -> list[str]:
    """The broken runtimes of which nothing was found."""
    sound, missed = run(rank, QUICK, "late"), []
    assert not sound.wrong
    for name in names:
        with BROKEN[name]():
            broken = run(rank, QUICK, "late")
        if not broken.wrong and same(broken.means, sound.means):
            missed.append(name)
    return missed


@sampled("names", [*BROKEN])
def test_a_wait_left_out_is_found(names: list[str], late_two: Ranks) -> None:
    assert late_two.run(break_each, names) == [[], []]


def counted(rank: int, world: int, exchange: Any) -> Run:
    return run(rank, exchange, "late")


def test_payloads_alone_are_copied_and_nobody_is_waited_for(late_two: Ranks) -> None:
    runs = late_two.run(counted, QUICK)
    # it comes from host memory
    report_bytes = len(Record(used=bytes(len(SHAPES))).packed())
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
    whole_bytes = (
        sum(torch.Size(shape).numel() for shape in SHAPES) * torch.float32.itemsize
    )
    for one in late_two.run(counted, LOSSLESS):
        assert one.stats["encoded_on"] == {"cpu": one.stats["messages"]}
        assert one.stats["to_host_bytes_per_step"] == whole_bytes
        assert one.stats["to_device_bytes_per_step"] == whole_bytes
        assert one.stats["pinned_bytes"] == 0


def captured(rank: int, world: int) -> None:
    device = late.install()
    device.is_recording = True
    with pytest.raises(InvalidSetting, match="CUDA graph is being captured"):
        Streams().record_event(late.DEVICE)


def test_a_graph_that_holds_a_backward_pass_is_refused(late_two: Ranks) -> None:
    late_two.run(captured)


class Local(NamedTuple):
    """What local steps left on one rank, and where."""

    ends: list[Tensor]
    outer: dict[str, Any]
    wrong: list[str]
    kept_on: set[str]
    encoded_on: set[str]


def locally(rank: int, world: int, device: str, **kept: Any) -> Local:
    noted = late.install()
    model = layers(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rhythm = {"every": 4, "fragments": 2, "delay": 1, "mixing": 0.5}
    handle = gw.local_steps(model, optimizer, TOPK, **rhythm, **kept)
    for step in range(7):
        draw = torch.Generator().manual_seed(100 * rank + step)
        for param in model:
            param.grad = torch.randn(param.shape, generator=draw).to(device)
        optimizer.step()
    outer = handle.state_dict()["outer"]
    handle.end_period()
    held = {anchor.device.type for anchor in handle.outer.param_groups[0]["params"]}
    assert {anchor.device.type for anchor in handle.anchors().values()} == {device}
    where = {*handle.stats()["encoded_on"]}
    ends = [param.detach().cpu() for param in model]
    handle.detach()
    return Local(ends, outer, list(noted.wrong), held, where)


def test_anchors_on_the_host_have_the_hosts_bits(late_two: Ranks) -> None:
    hosts = late_two.run(locally, "cpu")
    assert same(hosts[0].ends, hosts[1].ends)
    for kept, where in (
        ({}, ("late", "late:0")),
        ({"outer_device": "cpu"}, ("cpu",) * 2),
    ):
        devices = late_two.run(partial(locally, **kept), "late")
        for host, device in zip(hosts, devices, strict=True):
            assert not device.wrong
            assert same(device.ends, host.ends)
            assert same(device.outer, host.outer)
            assert (device.kept_on, device.encoded_on) == ({where[0]}, {where[1]})


@pytest.mark.slow
def test_two_levels_make_the_hosts_bits(doomed: Ranks) -> None:
    doomed.run(compare, FEW, STEPS, mesh)


# ---- DDP models whose gradients a device computes: the host's bits, in order ---------


DDP_STEPS = 4
NUMEL = 300
TINY_MB = 0.001


class Factor(nn.Module):
    """A layer that multiplies element by element, so that a device has the host's
    bits.
    """

    def __init__(self, last: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, last, NUMEL))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


class Chain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(Factor(1.5 + place) for place in range(3)))


class LateFuture(torch.futures.Future[Any]):
    """A future whose result is there when the stream that was current at ``set_result``
    is.
    """

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


class Trained(NamedTuple):
    """What training left on one rank, and what was noted."""

    params: list[Tensor]
    stats: dict[str, Any]
    wrong: list[str]
    waits: list[str]


def train(rank: int, device: str, **settings: Any) -> Trained:
    noted = late.install()
    noted.has_network = settings.get("backend") == "nccl"
    inner = Chain().to(device)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    model = DistributedDataParallel(inner, init_sync=False, bucket_cap_mb=TINY_MB)
    settings |= {"bucket_cap_mb": TINY_MB, "compress_if": everything}
    handle = gw.attach(model, QUICK, **keywords(**settings))
    for step in range(DDP_STEPS):
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
    return Trained(params, stats, list(noted.wrong), waits)


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
