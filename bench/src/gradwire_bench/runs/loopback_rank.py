"""A rank of ``bench loopback``: it trains one model by DDP and by gradwire, in turn."""

import itertools
import resource
import sys
import threading
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.contract.registry import load
from gradwire.runtime.attach import attach
from gradwire_bench.runs.turns import detach, losses_of
from gradwire_bench.testbed.ranks import Json, Report
from gradwire_bench.training.tasks import make_task
from gradwire_bench.workloads.task import TrainingTask

DDP = "ddp"
UNDER_DDP = "ddp+"
"""The row of DDP by itself, and the begin of the name of a row of a DDP model that is
attached.
"""
WARM_UP = 3
"""The steps at the start of each turn that are not measured."""


class _Turn(NamedTuple):
    """One side's turn on this rank."""

    seconds: list[float]
    """The seconds of each step."""
    processor_s: float
    """The processor seconds of one step, of all threads."""
    switches: float
    """How often the rank's threads went to sleep in one step."""


class _Side:
    """One model that takes turns."""

    def __init__(self, name: str, task: TrainingTask, num_steps: int) -> None:
        torch.manual_seed(0)
        model: nn.Module = task.make_model()
        if name == DDP or name.startswith(UNDER_DDP):
            model = DistributedDataParallel(model)
        compressor = name.removeprefix(UNDER_DDP)
        self.handle = (
            None if name == DDP else attach(model, load("compress", compressor)())
        )
        self._optimizer = task.make_optimizer(model.parameters())
        rank = dist.get_rank()
        world = dist.get_world_size()
        self._losses = losses_of(task, model, WARM_UP + num_steps, rank, world)

    def turn(self) -> _Turn:
        """Trains by all batches, of which the first warm up."""
        ends_s = [time.perf_counter()]
        began_s = 0.0
        slept = 0
        for step, loss in enumerate(self._losses):
            if step == WARM_UP:
                began_s = time.process_time()
                slept = _num_switches()
            self._optimizer.zero_grad()
            loss().backward()
            self._optimizer.step()
            ends_s.append(time.perf_counter())
        num_steps = len(self._losses) - WARM_UP
        steps = [b - a for a, b in itertools.pairwise(ends_s)]
        return _Turn(
            steps[WARM_UP:],
            (time.process_time() - began_s) / num_steps,
            (_num_switches() - slept) / num_steps,
        )


def _calls(name: str, task: TrainingTask, num_steps: int) -> float:
    """The calls of Python's functions in a step of one side, in all its threads."""
    calls = itertools.count()

    def count(frame: object, event: str, arg: object) -> None:
        if event == "call":
            next(calls)

    threading.setprofile(count)  # for the threads that attach starts
    side = _Side(name, task, num_steps)
    threading.setprofile(None)
    side.turn()
    before = next(calls)
    sys.setprofile(count)
    side.turn()
    sys.setprofile(None)
    detach([side])
    return (next(calls) - before) / (WARM_UP + num_steps)


def _num_switches() -> int:
    """The voluntary context switches of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def measure(settings: Json, report: Report) -> Json:
    """This rank's turns of each row, by the fields of ``_Turn``, and its ``calls``."""
    torch.set_num_threads(1)
    task = make_task(settings["task"])
    turns = settings["turns"]
    sides = {
        name: _Side(name, task, settings["iterations"]) for name in settings["rows"]
    }
    figures: Json = {name: {part: [] for part in _Turn._fields} for name in sides}
    for turn in range(turns):
        for place, (name, side) in enumerate(sides.items()):
            report((turn + place / len(sides)) / turns, name)
            dist.barrier()
            for part, figure in side.turn()._asdict().items():
                figures[name][part].append(figure)
    detach(sides.values())
    for name in sides:
        figures[name]["calls"] = [_calls(name, task, settings["iterations"])]
    return figures
