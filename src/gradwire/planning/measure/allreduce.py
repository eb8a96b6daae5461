"""The cost of torch's own all-reduce in a group: a quick look at a link, for ``gradwire doctor``.

Beside it are the seconds of a gradient's path: from where it is computed to the link and back.

The cost of a message in gradwire's runtime, by any verb, is measured by
``links.measure_cluster``.
"""

from __future__ import annotations

import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from pydantic import Field
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from ...contract import Compressor
from ...contract.registry import load
from ...contract.spec import TensorSpec
from ...contract.travel import travel
from ...contract.verbs import AllGather
from ...errors import GradwireError, InvalidSetting
from ...runtime.device.devices import kind_of
from ...runtime.device.staging import Staging
from ...runtime.step.messages import copy_scaled
from ..data.fit import LineFit, fit_line
from ..data.stored import Frozen

T = TypeVar("T")

SIZES_BYTES = (4 * 2**10, 32 * 2**10, 256 * 2**10, 2**20, 4 * 2**20, 16 * 2**20)
"""Sizes from where alpha decides to where beta does, on links of 100 Mbit/s to 100 Gbit/s."""

TIMEOUT_S = 120.0


PARTS = ("gather", "encode", "copy to host", "wire", "copy back", "decode")
"""The parts of a gradient's path, of which the copies are absent where it is sent from."""
_PATH_NUMEL, _PATH_TURNS = 2**20, 8


class LinkReport(Frozen):
    """A measured group: how many ranks, over what, and the line through the median of each size.

    ``path`` has rank 0's median seconds of each of ``PARTS``, None for one that is absent, for a
    gradient on ``device``: 2^20 elements of float32, which travel as four bits (``uniform``).
    """

    world: int
    backend: str
    fit: LineFit
    device: str = ""
    path: dict[str, float | None] = Field(default_factory=dict)

    @property
    def rate_bytes_per_s(self) -> float:
        """Bytes a second that a rank sends of long messages; a ring sends 2(W-1)/W of a buffer."""
        if self.fit.per_unit_s <= 0:
            return float("inf")
        return travel("all_reduce", self.world).copies / self.fit.per_unit_s


def measure(
    group: dist.ProcessGroup | None = None,
    *,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    device: torch.device | str = "cpu",
    advance: Callable[..., None] | None = None,
) -> LinkReport:
    """Times all-reduces of float32 in ``group``; every rank of it must call this alike.

    Rank 0's clock decides and is broadcast, so all ranks return the same report. ``advance`` is
    called after every size. Raises InvalidSetting in a group of one, which has no link.
    """
    world = dist.get_world_size(group)
    if world < 2:
        raise InvalidSetting(f"a link joins at least two ranks, got {world}; start more ranks")
    median_s = []
    for size_bytes in sizes_bytes:
        median_s.append(_median_s(group, size_bytes, torch.device(device)))
        if advance is not None:
            advance(note=f"{size_bytes} bytes")
    agreed_S = torch.tensor(median_s, dtype=torch.float64, device=device)
    dist.broadcast(agreed_S, group=group, group_src=0)
    fit = fit_line(zip(sizes_bytes, agreed_S.tolist(), strict=True))
    on = torch.device("cuda") if torch.cuda.is_available() else torch.device(device)
    path = path_s(on, torch.device(device), group)
    backend = dist.get_backend(group)
    return LinkReport(world=world, backend=backend, fit=fit, device=str(on), path=path)


def path_s(
    device: torch.device, sent_from: torch.device, group: dist.ProcessGroup | None = None
) -> dict[str, float | None]:
    """The median seconds of each of ``PARTS`` on this rank; every rank of ``group`` calls it.

    A gradient on ``device`` is gathered and encoded there, its payload is gathered from all ranks
    by ``group``, whose back end sends from memory of ``sent_from``, and one payload is decoded.
    """
    codec: Compressor = load("compress", "uniform")()
    kind, staging = kind_of(device), Staging()
    spec = TensorSpec("measured", _PATH_NUMEL, device=device.type)
    state, taken_s = codec.init(spec), {part: list[float]() for part in PARTS}
    source_N = torch.linspace(-1, 1, _PATH_NUMEL).to(device)
    grad_N, residual_N = torch.zeros_like(source_N), torch.zeros_like(source_N)
    buffer = torch.zeros(codec.format(spec).size_bytes, dtype=torch.uint8, device=device)
    all_M = buffer.repeat(dist.get_world_size(group))

    def timed(part: str, work: Callable[[], T]) -> T:
        start_s = time.perf_counter()
        found = work()
        if kind is not None:
            kind.record(kind.current_stream(device)).synchronize()
        taken_s[part].append(time.perf_counter() - start_s)
        return found

    for _ in range(_PATH_TURNS):  # the first one opens connections and touches fresh pages
        timed("gather", lambda: copy_scaled([grad_N], [source_N], 1.0))
        encode = partial(codec.encode, state, grad_N, residual_N=residual_N, buffer=buffer)
        payload, state = timed("encode", encode)
        verb, staged = AllGather(all_M, buffer), None
        if kind is not None and device.type != sent_from.type:
            where = [dist.get_rank(group)], kind, kind.current_stream(device)
            staged = timed("copy to host", partial(staging.out, 0, [verb], *where))
            assert staged is not None, "what lies on a device is staged"
            (verb,) = staged.verbs
        dist.barrier(group=group)
        timed("wire", partial(dist.all_gather_into_tensor, verb.out, verb.buf, group=group))
        if staged is not None:
            timed("copy back", staged.back)
        timed("decode", partial(codec.decode, payload, grad_N, scale=1.0))
    return {part: statistics.median(own[1:]) if own else None for part, own in taken_s.items()}


def _median_s(group: dist.ProcessGroup | None, size_bytes: int, device: torch.device) -> float:
    buffer_N = torch.zeros(max(1, size_bytes // 4), device=device)

    def wait_for_device() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    taken_s = []
    # Decided by the size alone: all ranks must call equally often. Short ones scatter more.
    num_repeats = 25 if size_bytes <= 2**18 else 7
    for repeat in range(num_repeats + 1):
        dist.barrier(group=group)
        wait_for_device()
        start_s = time.perf_counter()
        dist.all_reduce(buffer_N, group=group)
        wait_for_device()
        if repeat:  # the first one opens connections and touches fresh pages
            taken_s.append(time.perf_counter() - start_s)
    return statistics.median(taken_s)


def measure_launched(advance: Callable[..., None] | None = None) -> LinkReport:
    """Joins the group that torchrun's variables describe, measures it and leaves it again.

    NCCL where every rank of this host has a GPU of its own, otherwise gloo.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_gpu = dist.is_nccl_available() and torch.cuda.device_count() >= num_local
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S)
    )
    try:
        return measure(device=device, advance=advance)
    finally:
        dist.destroy_process_group()


def measure_loopback(num_ranks: int = 2) -> LinkReport:
    """Measures gloo between processes started for this on the loopback interface.

    Raises GradwireError with the last words of a process that failed.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        try:
            spawn(_loopback_rank, (num_ranks, folder), nprocs=num_ranks)  # type: ignore[no-untyped-call]
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise GradwireError(f"the loopback could not be measured: {error}") from error
        return LinkReport.model_validate_json((Path(folder) / "report.json").read_bytes())


def _loopback_rank(rank: int, num_ranks: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    where = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=where, rank=rank, world_size=num_ranks, timeout=timeout
    )
    try:
        found = measure()
        if rank == 0:
            (Path(folder) / "report.json").write_bytes(found.model_dump_json().encode())
    finally:
        dist.destroy_process_group()
