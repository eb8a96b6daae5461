"""One rank of ``gradwire profile``: measures a cluster by verbs, then codecs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...runtime.failure.membership import join
from ...runtime.step.engine import Engine
from ..data.cluster import VERBS, Cluster
from .beside import median_pace
from .codecs import SIZES, measure_codecs
from .links import BUDGET_S, SIZES_BYTES, measure_cluster

# ---- The process group of ranks that torchrun started, for a command that measures in it ---------

Report = Callable[[float, str], None]
"""Tells how far a measurement is: (fraction done in [0, 1], what is going on)."""


@contextmanager
def launched_group() -> Iterator[None]:
    """Joins the group that torchrun's variables describe, and leaves it again at the outermost end.

    Inside of another such block, or where the user's own code has joined already, nothing is done:
    a group that is joined a second time meets what the first one left in its store.
    """
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


# ---- one rank ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LinksBench:
    """Settings of a measurement on every rank; plain values, so that they can be sent as JSON."""

    compressors: tuple[str, ...] = ()
    rate_bytes_per_s: float | None = None
    """The links' rate where it is known."""
    sizes_bytes: tuple[int, ...] = SIZES_BYTES
    budget_s: float = BUDGET_S
    threads: int | None = None
    """Threads of each rank; None leaves torch's own number."""


def measure(settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """The cluster, as its file's text; ``settings`` are those of a ``LinksBench``."""
    return {"cluster": measure_group_links(LinksBench(**settings), report).to_json()}


def measure_group_links(bench: LinksBench, report: Report) -> Cluster:
    """Measures the ranks of torch's default group, which all call this alike.

    Codecs are measured on all ranks at once: in a step all of them encode at the same time.
    """
    if bench.threads is not None:
        torch.set_num_threads(bench.threads)
    total = len(VERBS) * len(bench.sizes_bytes) + len(bench.compressors) * len(SIZES)
    done = 0.0

    def advance(amount: float, note: str) -> None:
        nonlocal done
        done += amount
        report(min(done / total, 1.0), note)

    who = join(None)
    codecs = measure_codecs(bench.compressors, world=who.world, advance=advance)
    engine = Engine(who, num_channels=2, timeout=timedelta(minutes=2), on_span=lambda span: None)
    try:
        beside = median_pace(engine) if codecs else 1.0
        found = measure_cluster(
            engine,
            rate_bytes_per_s=bench.rate_bytes_per_s,
            sizes_bytes=bench.sizes_bytes,
            budget_s=bench.budget_s,
            codecs=codecs,
            advance=advance,
        )
        return found.model_copy(update={"beside": beside})
    finally:
        engine.close()
