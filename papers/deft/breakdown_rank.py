"""A rank of the breakdown: it trains by each method in turn, and times a step's parts.

The gradient is one message, exchanged when backward is over: nothing overlaps, as in
DEFT's figure 7, so that the parts add up to the step.
"""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from gradwire.contract import Member
from gradwire.contract.registry import load
from gradwire.exchange.by_name import exchange_for
from gradwire.kernels.libraries import backend
from gradwire.runtime.engine.engine import Engine
from gradwire.runtime.liveness.membership import join
from gradwire_bench.testbed.ranks import Report
from gradwire_bench.workloads.task import TrainingTask
from gradwire_bench.workloads.train import message_of, views_in

from ..workloads import applications
from ..workloads.clocked import Spent, clocked

PARTS = (
    "forward",
    "backward",
    "norms",
    "selection",
    "partition",
    "merge",
    "communication",
)
"""The parts of a step. ``norms`` is the pass that an exchange with one support for all
ranks makes before it selects: it adds the residual and takes the layers' norms.
``partition`` is work that is done once for each layer, not for each element; ``merge``
adds up the payloads that arrived; ``communication`` includes waiting for other
ranks.
"""
_WARM_UP_STEPS = 2


class _Side:
    """The model that one method trains."""

    def __init__(
        self, name: str, settings: dict[str, Any], task: TrainingTask, engine: Engine
    ) -> None:
        torch.manual_seed(task.seed)
        self.task = task
        self.engine = engine
        self.model = task.make_model()
        parameters = list(self.model.parameters())
        self.optimizer = task.make_optimizer(parameters)
        spec = message_of(parameters)
        self.grad_N = torch.zeros(spec.numel)
        for parameter, view in zip(
            parameters, views_in(self.grad_N, parameters), strict=True
        ):
            parameter.grad = view
        algorithm = load("compress", name)(**settings)
        self.exchange = exchange_for(algorithm)
        self._has_norms = algorithm.traits.shared_support
        self.member = Member(engine.rank, engine.world)
        self.state = self.exchange.init(spec, engine.world)

    def step(self, index: int) -> list[float]:
        """Takes one step; returns the seconds of each of ``PARTS``."""
        rank = self.engine.rank
        world = self.engine.world
        batch = self.task.batch(index, rank, world)
        self.grad_N.zero_()
        dist.barrier()
        marks_s = [time.perf_counter()]
        loss = self.task.loss(self.model, *batch)
        marks_s.append(time.perf_counter())
        loss.backward()  # type: ignore[no-untyped-call]
        marks_s.append(time.perf_counter())
        spent: Spent = {}
        own = self.exchange.synchronise(
            self.member, self.state, self.grad_N, self.grad_N
        )
        end = self.engine.launch(0, "gradient", clocked(own, spent))
        self.engine.wait([end])
        marks_s.append(time.perf_counter())
        self.state = end.result
        self.optimizer.step()
        forward_s, backward_s, exchange_s = (b - a for a, b in pairwise(marks_s))
        norms_s = (
            spent["encode", self.grad_N.numel()].pop(0) if self._has_norms else 0.0
        )
        work_s = [norms_s, *_by_part(spent, self.grad_N.numel() // world)]
        return [forward_s, backward_s, *work_s, exchange_s - sum(work_s)]


def _by_part(spent: Spent, share: int) -> list[float]:
    """Seconds of selection, partition and merge; ``share`` is a rank's share of the
    elements.
    """
    found = [0.0, 0.0, 0.0]
    for (name, numel), seconds in spent.items():
        per_layer = numel < share
        found[2 if name != "encode" else int(per_layer)] += sum(seconds)
    return found


def measure(settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """The seconds of each step's parts by method, and the number of elements."""
    torch.set_num_threads(1)
    backend()
    who = join(None)
    engine = Engine(
        who, num_channels=1, timeout=timedelta(minutes=2), on_span=lambda span: None
    )
    task = getattr(applications, settings["task"])(**settings["sizes"])
    sides = {
        title: _Side(name, own, task, engine)
        for title, (name, own) in settings["methods"].items()
    }
    found: dict[str, list[list[float]]] = {title: [] for title in sides}
    num_steps = settings["num_steps"] + _WARM_UP_STEPS
    for index in range(num_steps):
        for title, side in sides.items():
            report(index / num_steps, title)
            parts_s = side.step(index)
            if index >= _WARM_UP_STEPS:
                found[title].append(parts_s)
    engine.close()
    numel = next(iter(sides.values())).grad_N.numel()
    return {"steps": found, "numel": numel}
