"""A rank of ``energy``: it replays a model under each framework's plan and counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire.planning import catalogue
from gradwire.planning.data.cluster import Cluster
from gradwire_bench.schedule.replay import scaled_profile
from gradwire_bench.schedule.schedule_rank import make_plan, replay
from gradwire_bench.schedule.sharing import keep_queues_short, share_cores
from gradwire_bench.testbed.ranks import Report

RAPL = Path("/sys/class/powercap")


def measure(settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """The communications, seconds and joules of an iteration under each framework."""
    torch.set_num_threads(1)
    share_cores(dist.get_rank(), dist.get_world_size())
    keep_queues_short(settings["rate_bytes_per_s"])
    cluster = Cluster(
        num_ranks=dist.get_world_size(),
        rate_bytes_per_s=settings["rate_bytes_per_s"],
        hop_s=settings["hop_s"],
    )
    return {
        name: _measure_one(name, chosen, cluster, settings, report)
        for name, chosen in settings["frameworks"].items()
    }


def _measure_one(
    name: str,
    chosen: dict[str, Any],
    cluster: Cluster,
    settings: dict[str, Any],
    report: Report,
) -> dict[str, Any]:
    profile = catalogue.load(settings["model"])
    row = {"planner": name.split(",")[0], "settings": chosen, "tune": False}
    plan = make_plan(profile, cluster, row, settings)
    small = scaled_profile(
        profile, scale=settings["scale"], slowdown=settings["slowdown"]
    )
    iterations = settings["iterations"]
    dist.barrier()
    read_joules = joules_counter()
    busy_s = time.process_time()
    run = replay(small, {name: plan}, 1, iterations, report)[name]
    # the warm-up is an iteration too, which attaching comes before
    spent_s = (time.process_time() - busy_s) / (iterations + 1)
    joules = read_joules()
    dist.barrier()
    # a step's report to all ranks has the number behind the plan's last message
    sent = {
        span.message
        for span in run.trace.spans
        if span.lane == "communication" and span.message < len(plan.messages)
    }
    seconds = [end_s - start_s for start_s, end_s in run.iterations]
    return {
        "num_communications": len(sent),
        "iteration_s": sum(seconds) / len(seconds),
        "processor_s": spent_s,
        "joules": None if joules is None else joules / (iterations + 1),
    }


def joules_counter(folder: Path = RAPL) -> Callable[[], float | None]:
    """Reads RAPL's packages now; the function gives the joules since then.

    It gives None where there are no counters, or they may not be read.
    """
    try:
        packages = sorted(
            path
            for path in folder.glob("*:*")
            if (path / "name").read_text(encoding="utf-8").startswith("package")
        )
        before = [_number(path / "energy_uj") for path in packages]
        spans = [_number(path / "max_energy_range_uj") for path in packages]
    except OSError:
        return lambda: None
    if not packages:
        return lambda: None

    def since() -> float:
        """A counter that is below what it was has begun again at 0."""
        joules = 0.0
        for path, start, span in zip(packages, before, spans, strict=True):
            joules += (_number(path / "energy_uj") - start) % (span + 1) / 1e6
        return joules

    return since


def _number(path: Path) -> int:
    return int(path.read_text(encoding="utf-8"))
