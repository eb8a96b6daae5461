"""A rank of ``pipeline``: a replayed model under DDP's hook, and under CaSync-PS."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.collective.casync_ps import casync_ps
from gradwire.contract import Compressor
from gradwire.contract.payload import Payload
from gradwire.contract.registry import load
from gradwire.contract.spec import spec_of
from gradwire.contract.trace.span import Span
from gradwire.exchange.pair import pair
from gradwire.kernels.libraries import backend
from gradwire.planning import catalogue
from gradwire.planning.data.profile import Profile
from gradwire.runtime.attach import attach
from gradwire.runtime.grid.shards import TORCHRUN
from gradwire.runtime.settings import FailurePolicy, Options
from gradwire.runtime.transport.task_graph import wall_clock
from gradwire_bench.schedule.replay import Replay, VirtualDevice, scaled_profile
from gradwire_bench.schedule.sharing import keep_queues_short, share_cores
from gradwire_bench.testbed.ranks import Report

from ..links import united
from .pipeline import DDP, HIPRESS

BUCKET_MB = 25.0
"""DDP's default, before bytes are scaled; both sides fuse so much."""
WARM_UP = 2
Stretches = list[tuple[float, float]]


def measure(settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """The seconds of each step's parts by side."""
    torch.set_num_threads(1)
    backend()
    share_cores(dist.get_rank(), dist.get_world_size())
    keep_queues_short(settings["rate_bytes_per_s"])
    profile = scaled_profile(
        catalogue.load(settings["model"]),
        scale=settings["scale"],
        slowdown=settings["slowdown"],
    )
    codec: Compressor = load("compress", settings["compressor"])()
    bucket_mb = BUCKET_MB / settings["scale"]
    steps = settings["steps"] + WARM_UP
    report(0.0, DDP)
    in_hook = _under_ddp(profile, codec, bucket_mb, steps)
    report(0.5, HIPRESS)
    ours = _under_casync(profile, codec, bucket_mb, steps)
    return {DDP: in_hook[WARM_UP:], HIPRESS: ours[WARM_UP:]}


# ---- DDP -----------------------------------------------------------------------------


class _Hook:
    """Encodes, gathers and decodes a bucket while the backward pass waits."""

    def __init__(self, codec: Compressor, device: VirtualDevice) -> None:
        self.codec = codec
        self.device = device
        self.spans: list[Span] = []
        self._states: dict[int, Any] = {}

    def average(self, bucket: Any) -> Tensor:
        grad_N: Tensor = bucket.buffer()
        spec = spec_of(grad_N)
        index = bucket.index()
        if index not in self._states:
            self._states[index] = self.codec.init(spec)
        world = dist.get_world_size()
        marks_s = [wall_clock()]
        payload, state = self.codec.encode(self._states[index], grad_N)
        self._states[index] = state
        marks_s.append(wall_clock())
        own = payload.buffer
        assert own is not None
        size = own.numel()
        gathered = torch.empty(world * size, dtype=torch.uint8)
        dist.all_gather_into_tensor(gathered, own)
        marks_s.append(wall_clock())
        form = self.codec.received(spec, size)
        grad_N.zero_()
        for received in torch.split(gathered, size):
            self.codec.merge(Payload(form, received), grad_N, scale=1 / world)
        marks_s.append(wall_clock())
        lanes = ("compute", "communication", "compute")
        for lane, start_s, end_s in zip(lanes, marks_s, marks_s[1:], strict=False):
            self.spans.append(Span(dist.get_rank(), lane, "bucket", start_s, end_s))
        # the layer behind this one starts when the hook is over
        self.device.free_s = marks_s[-1]
        return grad_N

    def take_spans(self) -> list[Span]:
        """The spans since the last call."""
        taken = self.spans
        self.spans = []
        return taken


def _under_ddp(
    profile: Profile, codec: Compressor, bucket_mb: float, steps: int
) -> list[dict[str, float]]:
    rank = dist.get_rank()
    device = VirtualDevice(rank)
    model = Replay(profile, device, gradient=float(rank), seed=rank)
    trained = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    hook = _Hook(codec, device)

    # torch wants a function, and this name of its second argument
    def compressed(state: _Hook, bucket: Any) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(state.average(bucket))
        return done

    # torch refuses annotations that are strings
    compressed.__annotations__ = {}
    trained.register_comm_hook(hook, compressed)
    return _steps(trained, device, steps, hook.take_spans)


# ---- CaSync-PS -----------------------------------------------------------------------


def _under_casync(
    profile: Profile, codec: Compressor, bucket_mb: float, steps: int
) -> list[dict[str, float]]:
    rank = dist.get_rank()
    device = VirtualDevice(rank)
    model = Replay(profile, device, gradient=float(rank), seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = attach(
        model,
        pair(codec, casync_ps()),
        optimizer=optimizer,
        mesh=TORCHRUN,
        failure=FailurePolicy(timeout=timedelta(minutes=5)),
        # replayed tensors are all flat, as vectors are
        options=Options(
            trace_steps=2,
            bucket_cap_mb=bucket_mb,
            compress_if=lambda name, parameter: True,
        ),
    )
    try:
        return _steps(model, device, steps, lambda: handle.trace().spans)
    finally:
        handle.detach()


# ---- both ----------------------------------------------------------------------------


def _steps(
    model: torch.nn.Module,
    device: VirtualDevice,
    steps: int,
    spans: Callable[[], Iterable[Span]],
) -> list[dict[str, float]]:
    """The seconds of each step's parts: a forward pass and the backward pass after it.

    ``spans`` gives those of communication and compression; others are left out.
    """
    found = []
    for _ in range(steps):
        device.take_spans()
        dist.barrier()
        start_s = wall_clock()
        model().backward()
        device.synchronise()
        end_s = wall_clock()
        inside = [
            span for span in spans() if start_s <= span.start_s and span.end_s <= end_s
        ]
        found.append(parts_of(end_s - start_s, [*device.take_spans(), *inside]))
        model.zero_grad()
    return found


def parts_of(step_s: float, spans: Iterable[Span]) -> dict[str, float]:
    """A step's parts: the seconds in which each runs, and those in which none does.

    >>> spans = [Span(0, "backward", "a", 0.0, 2.0), Span(0, "compute", "a", 1.0, 4.0)]
    >>> parts_of(5.0, spans)["bubbles_s"]
    1.0
    """
    by_part: dict[str, Stretches] = {"compute": [], "communication": [], "code": []}
    names = {"forward": "compute", "backward": "compute", "compute": "code"}
    for span in spans:
        part = names.get(span.lane, span.lane)
        if part in by_part:
            by_part[part].append((span.start_s, span.end_s))
    computing, sending, coding = by_part.values()
    others = _seconds([*computing, *sending])
    busy = _seconds([*computing, *sending, *coding])
    coded = _seconds(coding)
    return {
        "step_s": step_s,
        "compute_s": _seconds(computing),
        "communication_s": _seconds(sending),
        "compression_s": coded,
        "bubbles_s": max(0.0, step_s - busy),
        "fraction_compression_hidden": 1 - (busy - others) / coded if coded else 0.0,
    }


def _seconds(stretches: Stretches) -> float:
    return sum(end_s - start_s for start_s, end_s in united(stretches))
