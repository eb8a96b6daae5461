"""One rank of ``bench auto``: one model by DDP, by ``auto`` and by single exchanges, in
turn.

``auto`` begins by itself, until its first plan, or its first dense answer, has been
watched. Then all take turns of a few steps, so that all of them see the same moods of
the machine.
"""

import math
import os
import time
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.pilot.auto import auto
from gradwire.runtime.attach import attach
from gradwire.runtime.settings import Options

from ..testbed.ranks import Json, Report
from ..training.tasks import make_task
from ..training.trainer import TurnRun
from ..workloads.task import TrainingTask

LOOK = 7
"""Steps between two looks at what ``auto`` decided: a look waits for all that is
pending.
"""
MOST_STEPS = 120
"""The most steps in which ``auto`` is to come to a decision, and the most of a turn."""


@dataclass
class Contender(TurnRun):
    """One model on its way, and the seconds of its steps so far."""

    turns_s: list[list[float]] = field(default_factory=list)
    """Seconds of the steps of each turn that was measured."""
    core_s: float = 0.0
    """Seconds of a core that this process took for these steps."""


def measure(settings: Json, report: Report) -> Json:
    """Seconds of every side's steps, and the words of ``auto``."""
    torch.set_num_threads(1)
    task = make_task(settings["task"])
    pilot = auto(fidelity=settings["fidelity"])
    report(0.0, "auto decides")
    under_ddp = settings["under"] == "ddp"
    sides = {}
    sides["ddp"] = _start(task, None, True)
    sides["auto"] = _start(task, pilot, under_ddp)
    _decide(sides["auto"], task)
    for name in settings["singles"]:
        sides[name] = _start(task, name, under_ddp)
    rounds = settings["rounds"]
    counts = dict.fromkeys(sides, int(settings["steps"]))
    for turn in range(rounds + 1):  # the first warms up, and tells how long steps are
        order = list(sides.items())
        # nobody is always the first, or always behind the same other
        shift = turn % len(order)
        for place, (name, side) in enumerate(order[shift:] + order[:shift]):
            done = turn + place / len(sides)
            report(done / (rounds + 1), name)
            if turn:
                _take_turn(side, task, counts[name])
                continue
            _take_turn(side, task, 2)
            counts[name] = _num_steps(side.turns_s.pop(), settings)
            side.core_s = 0.0
    return {
        "turns_s": {name: side.turns_s for name, side in sides.items()},
        "core_s": {name: side.core_s for name, side in sides.items()},
        "num_cores": len(os.sched_getaffinity(0)),
        "pilot": _pilot(sides["auto"]),
        "description": task.description,
    }


def _num_steps(last_s: list[float], settings: Json) -> int:
    """The steps of a turn, the same on all ranks: those of so many seconds, and some at
    least.
    """
    slowest = torch.tensor(median(last_s), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    least = int(settings["steps"])
    turn_s = float(settings["turn_s"])
    return max(least, min(MOST_STEPS, math.ceil(turn_s / float(slowest))))


def _start(task: TrainingTask, chosen: auto | str | None, under_ddp: bool) -> Contender:
    torch.manual_seed(0)
    model = task.make_model()
    optimizer = task.make_optimizer(model.parameters())
    if under_ddp:
        model = DistributedDataParallel(model)
    if chosen is None:
        return Contender(model, optimizer, None)
    handle = attach(model, chosen, optimizer=optimizer, options=Options(trace_steps=0))
    return Contender(model, optimizer, handle)


def _pilot(side: Contender) -> Json:
    assert side.handle is not None
    figures: Json = side.handle.stats()["pilot"]
    return figures


def _decide(side: Contender, task: TrainingTask) -> None:
    while side.step < MOST_STEPS and (
        side.step % LOOK or _pilot(side)["step_s"] is None
    ):
        side.train_step(task)


def _take_turn(side: Contender, task: TrainingTask, num_steps: int) -> None:
    """A few steps; the one before them ends what other sides have left in queues and
    caches.

    What that step leaves pending is waited for in the first that is measured, as what
    the last one leaves is in none.
    """
    dist.barrier()
    side.train_step(task)
    steps_s = list[float]()
    core_s = time.process_time()
    for _ in range(num_steps):
        start_s = time.perf_counter()
        side.train_step(task)
        steps_s.append(time.perf_counter() - start_s)
    side.turns_s.append(steps_s)
    side.core_s += time.process_time() - core_s
    if side.handle is not None:
        side.handle.synchronize()
    dist.barrier()
