"""HSDP among hosts: native, with dense shards, beside exchanges of shards.

gradwire testbed run --hosts 2 --ranks-per-host 2 --rate 200mbit -- \\
  python -m gradwire_bench.runs.hsdp

A replica is one host. All sides train the same model in the same processes, in turn:
native HSDP, ``fully_shard`` on one dimension with ``attach(group=mesh["replicate"])``
for each exchange, and the same without an average among hosts (``alone``), which no
exchange can be faster than.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradwire.cli.report.table import Row
from gradwire.compress.int8 import int8
from gradwire.compress.none import none
from gradwire.compress.uniform import uniform
from gradwire.contract import Compressor
from gradwire.runtime.attach import attach
from gradwire_bench.runs.turns import (
    TrainedSide,
    detach,
    losses_of,
    print_rows,
    seconds_in_turn,
)
from gradwire_bench.training.tasks import make_task
from gradwire_bench.workloads.task import TrainingTask

NATIVE = "native"
ALONE = "alone"
EXCHANGES: dict[str, Compressor] = {
    "uniform, 4 bits": uniform(bitwidth=4),
    "int8": int8(),
    "none": none(),
}
REPLICAS = 2


def side_of(
    name: str, task: TrainingTask, mesh: DeviceMesh, num_steps: int
) -> TrainedSide:
    """One sharded model."""
    torch.manual_seed(0)
    model: Any = task.make_model()
    within = mesh if name == NATIVE else mesh["shard"]
    for child in model.children():
        for block in child if isinstance(child, nn.ModuleList) else (child,):
            fully_shard(block, mesh=within)
    sharded = fully_shard(model, mesh=within)
    handle = None
    if name in EXCHANGES:
        handle = attach(model, EXCHANGES[name], group=mesh["replicate"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    rank = dist.get_rank()
    world = dist.get_world_size()
    losses = losses_of(task, sharded, num_steps, rank, world)
    return TrainedSide(handle, optimizer, losses)


def measure(task: TrainingTask, turns: int, num_steps: int) -> list[Row]:
    """A row a side: the median over turns of a step's seconds, on the slowest rank."""
    grid = REPLICAS, dist.get_world_size() // REPLICAS
    mesh = init_device_mesh("cpu", grid, mesh_dim_names=("replicate", "shard"))
    sides = {
        name: side_of(name, task, mesh, num_steps)
        for name in (NATIVE, *EXCHANGES, ALONE)
    }
    seconds = seconds_in_turn(sides.values(), turns)
    medians = [float(row.median()) for row in seconds]
    detach(sides.values())
    return [
        {"name": name, "step_s": step_s, "speedup_vs_native": medians[0] / step_s}
        for name, step_s in zip(sides, medians, strict=True)
    ]


def main(task: str = "perceptron", turns: int = 5, steps: int = 8) -> None:
    """Measures turns of so many steps; rank 0 prints."""
    print_rows(partial(measure, make_task(task), turns, steps))


if __name__ == "__main__":
    typer.run(main)
