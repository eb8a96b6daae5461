"""A rank of ``cost``: it exchanges one gradient by each method, and counts and times
what travels.

What single collectives cost is measured in the same run. Methods take turns.
"""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradwire.collective.steps.travel import NAMES, sent_bytes
from gradwire.contract import Member
from gradwire.contract.registry import load
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import Compute, Verb
from gradwire.exchange.by_name import exchange_for
from gradwire.kernels.libraries import backend
from gradwire.measure.links import measure_cluster
from gradwire.planning.data.cluster import VerbName
from gradwire.runtime.engine.engine import Engine
from gradwire.runtime.liveness.membership import join
from gradwire_bench.schedule.sharing import share_cores
from gradwire_bench.testbed.counters import own_counters
from gradwire_bench.testbed.ranks import Report

from ..workloads import applications
from ..workloads.clocked import Spent, clocked, watched
from .setting import accumulated

VERBS: tuple[VerbName, ...] = ("all_gather", "all_reduce", "broadcast")
"""The verbs of all methods, whose costs are measured."""
Asked = list[tuple[str, int, int]]
"""Verbs of one exchange by name, the size of the buffer in bytes, and the bytes that a
rank sends.
"""


class _Side:
    """One method at one density, with states and buffers of its own."""

    def __init__(
        self, name: str, settings: dict[str, Any], numel: int, engine: Engine
    ) -> None:
        self.engine = engine
        self.numel = numel
        self.exchange = exchange_for(load("compress", name)(**settings))
        self.member = Member(engine.rank, engine.world)
        self.state = self.exchange.init(TensorSpec("gradient", numel), engine.world)

    def step(self, grad_N: torch.Tensor) -> dict[str, Any]:
        """Exchanges the gradient, which becomes the mean; returns what was counted and
        timed.
        """
        spent: Spent = {}
        asked: Asked = []
        own = self.exchange.synchronise(self.member, self.state, grad_N, grad_N)
        dist.barrier()
        before = own_counters()
        start_s = time.perf_counter()
        seen = watched(clocked(own, spent), partial(self._see, asked))
        end = self.engine.launch(0, "gradient", seen)
        self.engine.wait([end])
        seconds = time.perf_counter() - start_s
        dist.barrier()
        self.state = end.result
        taken = self.member.selection
        assert taken is not None
        return {
            "communication_s": seconds - sum(map(sum, spent.values())),
            "tx_bytes": own_counters().since(before).tx_bytes,
            "asked": asked,
            "num_own": taken.selected,
            "num_averaged": taken.arrived,
        }

    def _see(self, asked: Asked, verb: Verb) -> Verb:
        if not isinstance(verb, Compute):
            size_bytes = verb.buf.numel() * verb.buf.element_size()
            sent = sent_bytes(verb, self.engine.rank, self.engine.world)
            asked.append((NAMES[type(verb)], size_bytes, sent))
        return verb


def measure(settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """The counts and times of each method's steps, and the costs of verbs by size."""
    torch.set_num_threads(1)
    backend()
    share_cores(dist.get_rank(), dist.get_world_size())
    engine = Engine(
        join(None),
        num_channels=1,
        timeout=timedelta(minutes=2),
        on_span=lambda span: None,
    )
    report(0.0, "collectives")
    cluster = measure_cluster(
        engine,
        rate_bytes_per_s=settings["rate_bytes_per_s"],
        sizes_bytes=settings["sizes_bytes"],
        verbs=VERBS,
        budget_s=settings["budget_s"],
    )
    task = getattr(applications, settings["task"])(**settings["sizes"])
    source_N = accumulated(task, engine.rank, engine.world)
    sides = {
        title: _Side(name, own, source_N.numel(), engine)
        for title, (name, own) in settings["methods"].items()
    }
    found: dict[str, list[dict[str, Any]]] = {title: [] for title in sides}
    turns = settings["repeats"] + 1
    for turn in range(turns):
        for title, side in sides.items():
            report(turn / turns, title)
            step = side.step(source_N.clone())
            if turn:  # the first turn warms up
                found[title].append(step)
    engine.close()
    return {"steps": found, "numel": source_N.numel(), "cluster": cluster.to_json()}
