"""Sides of a comparison, timed in turn on all ranks of the default group."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.cli.report.table import Row, plain
from gradwire.runtime.handle import Handle

from ..workloads.task import TrainingTask

WARM_UP = 2
"""The steps at the start of each turn of a ``TrainedSide`` that are not measured."""


class Attached(Protocol):
    """A model with its handle; None where it is not attached."""

    @property
    def handle(self) -> Handle | None: ...


class Side(Protocol):
    """A side that takes turns."""

    def turn(self) -> float: ...


@dataclass
class TrainedSide:
    """A side that trains its model by as many steps in each turn."""

    handle: Handle | None
    optimizer: torch.optim.Optimizer
    losses: Sequence[Callable[[], Any]]
    """The functions that compute the loss of each step of a turn."""

    def backward(self, place: int) -> None:
        """The backward pass of one step."""
        self.optimizer.zero_grad()
        self.losses[place]().backward()

    def step(self, place: int) -> float:
        """The seconds of one step."""
        begin_s = time.perf_counter()
        self.backward(place)
        self.optimizer.step()
        return time.perf_counter() - begin_s

    def turn(self) -> float:
        """The seconds of a step, the median of one turn."""
        return median([self.step(place) for place in range(len(self.losses))][WARM_UP:])


def losses_of(
    task: TrainingTask, model: Any, num_steps: int, rank: int, world: int
) -> list[Callable[[], Any]]:
    """The losses of one rank's steps, on batches that are drawn now, as they cost the
    same on all sides.
    """
    batches = [task.batch(step, rank, world) for step in range(num_steps)]
    return [partial(task.loss, model, *batch) for batch in batches]


def seconds_in_turn(sides: Collection[Side], turns: int) -> Tensor:
    """Seconds of each side (a row) in each turn, on the slowest rank.

    In a turn each side has its own once, after all ranks have met.
    """
    seconds_ST = torch.zeros(len(sides), turns, dtype=torch.float64)
    for turn in range(turns):
        for place, side in enumerate(sides):
            dist.barrier()
            seconds_ST[place, turn] = side.turn()
    dist.all_reduce(seconds_ST, op=dist.ReduceOp.MAX)
    return seconds_ST


def detach(sides: Iterable[Attached]) -> None:
    """Detaches the sides that are attached."""
    for side in sides:
        if side.handle is not None:
            side.handle.detach()


def print_rows(measure: Callable[[], Sequence[Row]]) -> None:
    """Joins the ranks that a launcher has started, and prints on rank 0 what they
    measure.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = measure()
    if dist.get_rank() == 0:
        print(plain(rows), flush=True)
    dist.destroy_process_group()
