"""Sides of a comparison, timed in turn on all ranks of the default group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.cli.report.table import Row, plain


def seconds_in_turn(sides: Sequence[Callable[[], float]], turns: int) -> Tensor:
    """Seconds of each side (a row) in each turn, on the slowest rank.

    In a turn each side is called once, after all ranks have met.
    """
    seconds_ST = torch.zeros(len(sides), turns, dtype=torch.float64)
    for turn in range(turns):
        for place, side in enumerate(sides):
            dist.barrier()
            seconds_ST[place, turn] = side()
    dist.all_reduce(seconds_ST, op=dist.ReduceOp.MAX)
    return seconds_ST


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
