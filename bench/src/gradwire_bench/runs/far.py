r"""Steps between far hosts, in seconds: DDP, its hook and gradwire in one run, in turn.

gradwire testbed run --hosts 4 --rate 1gbit --delay 40 -- \
    python -m gradwire_bench.runs.far

The model is one layer of ``--width`` squared elements, or two with ``--layers 2``. A
turn is the median of its steps without the first ones; figures are of the slowest rank.
``shrink`` is ``uniform`` whose steps are confirmed, and ``local_steps`` is ``uniform``
with an exchange in each step.

A rank that is called late or lost ends the run. 200 MB of gradients take 240 s at 10
Mbit/s, four times the time-out here:

gradwire testbed run --hosts 4 --rate 10mbit -- \
    python -m gradwire_bench.runs.far --width 7071 --turns 1 --steps 4 \
    --methods none --timeout 60
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    fp16_compress_hook,
)

from gradwire.cli.report.table import Row
from gradwire.compress.uniform import uniform
from gradwire.contract.registry import load
from gradwire.runtime.attach import attach
from gradwire.runtime.handle import Handle
from gradwire.runtime.local_steps.local_steps import local_steps
from gradwire.runtime.settings import FailurePolicy

from ..training.trainer import under_ddp
from .turns import detach, print_rows, seconds_in_turn

DDP = "ddp"
HOOK = "ddp, fp16 hook"
SHRINK = "shrink"
LOCAL_STEPS = "local_steps"
METHODS = (DDP, HOOK, "none", "uniform", "topk", SHRINK, LOCAL_STEPS)
TIMEOUT_S = 300.0
"""Seconds for which gradwire waits for a silent rank."""
WARM_UP = 3
"""The steps at the start of each turn that are not measured."""


class Side:
    """One model that takes turns."""

    def __init__(
        self, method: str, width: int, layers: int, num_steps: int, timeout_s: float
    ) -> None:
        torch.manual_seed(0)
        stack = [nn.Linear(width, width) for _ in range(layers)]
        self.model: nn.Module = nn.Sequential(*stack)
        if method in (DDP, HOOK):
            hook = fp16_compress_hook if method == HOOK else None
            self.model = under_ddp(self.model, hook)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.handle = self._attached(method, timedelta(seconds=timeout_s))
        self._batch = torch.randn(8, width)
        self._num_steps = num_steps

    def _attached(self, method: str, timeout: timedelta) -> Handle | None:
        """The handle of a method of gradwire's."""
        optimizer = self._optimizer
        failure = FailurePolicy(timeout=timeout)
        if method in (DDP, HOOK):
            return None
        if method == LOCAL_STEPS:
            return local_steps(
                self.model, optimizer, uniform(), every=1, failure=failure
            )
        if method == SHRINK:
            failure = FailurePolicy(on_failure="shrink", timeout=timeout)
            return attach(self.model, uniform(), optimizer=optimizer, failure=failure)
        return attach(self.model, load("compress", method)(), failure=failure)

    def turn(self) -> float:
        """The seconds of a step, the median of one turn."""
        return median([self.step() for _ in range(self._num_steps)][WARM_UP:])

    def step(self) -> float:
        """The seconds of one step."""
        begin_s = time.perf_counter()
        self._optimizer.zero_grad()
        loss: Any = self.model(self._batch).square().mean()
        loss.backward()
        self._optimizer.step()
        return time.perf_counter() - begin_s


def measure(
    methods: Sequence[str],
    width: int,
    layers: int,
    turns: int,
    num_steps: int,
    timeout_s: float = TIMEOUT_S,
) -> list[Row]:
    """A row for each method, with the median and the range of its turns."""
    sides = {name: Side(name, width, layers, num_steps, timeout_s) for name in methods}
    seconds = seconds_in_turn(sides.values(), turns)
    detach(sides.values())
    return [
        {
            "name": name,
            "step_s": float(row.median()),
            "lowest_s": float(row.min()),
            "highest_s": float(row.max()),
        }
        for name, row in zip(sides, seconds, strict=True)
    ]


def main() -> None:
    """Measures, and prints a table on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    chosen = parser.parse_args()
    print_rows(
        partial(
            measure,
            chosen.methods,
            chosen.width,
            chosen.layers,
            chosen.turns,
            chosen.steps,
            chosen.timeout,
        )
    )


if __name__ == "__main__":
    main()
