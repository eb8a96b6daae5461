"""The cost of torch's own all-reduce in a group: a quick look at a link, for ``gradwire doctor``.

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
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from ...contract.travel import travel
from ...errors import GradwireError, InvalidSetting
from ..data.fit import LineFit, fit_line
from ..data.stored import Frozen

SIZES_BYTES = (4 * 2**10, 32 * 2**10, 256 * 2**10, 2**20, 4 * 2**20, 16 * 2**20)
"""Sizes from where alpha decides to where beta does, on links of 100 Mbit/s to 100 Gbit/s."""

TIMEOUT_S = 120.0


class LinkReport(Frozen):
    """A measured group: how many ranks, over what, and the line through the median of each size."""

    world: int
    backend: str
    fit: LineFit

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
    return LinkReport(world=world, backend=dist.get_backend(group), fit=fit)


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
