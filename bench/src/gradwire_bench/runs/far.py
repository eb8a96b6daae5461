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

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import typer
from torch import Tensor, nn
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

from ..checks import check_names
from ..training.trainer import under_ddp
from .turns import TrainedSide, detach, print_rows, seconds_in_turn

DDP = "ddp"
HOOK = "ddp, fp16 hook"
SHRINK = "shrink"
LOCAL_STEPS = "local_steps"
METHODS = (DDP, HOOK, "none", "uniform", "topk", SHRINK, LOCAL_STEPS)
TIMEOUT_S = 300.0
"""Seconds for which gradwire waits for a silent rank."""


def side_of(
    method: str, width: int, layers: int, num_steps: int, timeout_s: float
) -> TrainedSide:
    """The model by one method."""
    torch.manual_seed(0)
    stack = [nn.Linear(width, width) for _ in range(layers)]
    model: nn.Module = nn.Sequential(*stack)
    if method in (DDP, HOOK):
        model = under_ddp(model, fp16_compress_hook if method == HOOK else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = _attached(method, model, optimizer, timedelta(seconds=timeout_s))
    batch = torch.randn(8, width)

    def loss() -> Tensor:
        return model(batch).square().mean()  # type: ignore[no-any-return]

    return TrainedSide(handle, optimizer, [loss] * num_steps)


def _attached(
    method: str, model: nn.Module, optimizer: torch.optim.SGD, timeout: timedelta
) -> Handle | None:
    """The handle of a method of gradwire's."""
    failure = FailurePolicy(timeout=timeout)
    if method in (DDP, HOOK):
        return None
    if method == LOCAL_STEPS:
        return local_steps(model, optimizer, uniform(), every=1, failure=failure)
    if method == SHRINK:
        failure = FailurePolicy(on_failure="shrink", timeout=timeout)
        return attach(model, uniform(), optimizer=optimizer, failure=failure)
    return attach(model, load("compress", method)(), failure=failure)


def measure(
    methods: Sequence[str],
    width: int,
    layers: int,
    turns: int,
    num_steps: int,
    timeout_s: float = TIMEOUT_S,
) -> list[Row]:
    """A row for each method, with the median and the range of its turns."""
    sides = {
        name: side_of(name, width, layers, num_steps, timeout_s) for name in methods
    }
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


def main(
    width: int = 64,
    layers: int = 1,
    turns: int = 3,
    steps: int = 12,
    timeout: float = TIMEOUT_S,
    methods: list[str] | None = None,
) -> None:
    """Measures, and prints a table on rank 0."""
    chosen = methods or METHODS
    check_names("method", chosen, METHODS)
    print_rows(partial(measure, chosen, width, layers, turns, steps, timeout))


if __name__ == "__main__":
    typer.run(main)
