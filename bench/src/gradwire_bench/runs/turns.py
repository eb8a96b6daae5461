"""Sides of a comparison, timed in turn on all ranks of the default group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.cli.report.table import Row, plain
from gradwire.runtime.handle import Handle


class Attached(Protocol):
    """A model with its handle; None where it is not attached."""

    @property
    def handle(self) -> Handle | None: ...


class Side(Attached, Protocol):
    """A model that takes turns."""

    def turn(self) -> float: ...


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
