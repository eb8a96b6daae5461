"""Shrink: its cost in each step, and the time that ranks take to go on without a lost
one, and with a new one.

gradwire testbed run --hosts 4 --rate 200mbit -- python -m gradwire_bench.runs.shrink

Both ways of ``on_failure`` train the same model in the same processes, in turn. Then
the last rank ends in the middle of a backward pass. The seconds from there to the end
of the next whole step, on the slowest survivor, hold the time in which a silent rank
counts as lost. Another process on the last host then comes in. Its seconds from
``attach`` to the end of its first whole step hold the time in which rank 0 sees it, and
in which it gets the model and the optimizer's state.
"""

import json
import os
import time
from os import _exit as leave
from typing import Any

import torch
import torch.distributed as dist
import typer
from torch._C._distributed_c10d import TCPStore

from gradwire.cli.report.table import Row, plain
from gradwire.contract.registry import load
from gradwire.errors import RanksLost
from gradwire.runtime.attach import attach
from gradwire.runtime.handle import Handle
from gradwire.runtime.settings import FailurePolicy
from gradwire.runtime.transport.task_graph import wall_clock
from gradwire.runtime.transport.wire import root_store
from gradwire_bench.runs.turns import TrainedSide, losses_of, seconds_in_turn
from gradwire_bench.training.tasks import make_task
from gradwire_bench.workloads.task import TrainingTask

WAYS = "end", "shrink"


class Side(TrainedSide):
    """One model that takes turns; a step is repeated where a rank is lost in it."""

    handle: Handle

    def __init__(
        self,
        way: str,
        name: str,
        task: TrainingTask,
        num_steps: int,
        rejoin: Any = None,
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = task.make_model()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        policy = FailurePolicy(on_failure=way, rejoin=rejoin)
        exchange = load("compress", name)()
        handle = attach(self.model, exchange, optimizer=optimizer, failure=policy)
        losses = losses_of(task, self.model, num_steps, handle.rank, handle.world_size)
        super().__init__(handle, optimizer, losses)

    def backward(self, place: int) -> None:
        while True:
            try:
                return super().backward(place)
            except RanksLost as lost:
                print(lost, flush=True)


def measure(name: str, task: TrainingTask, turns: int, num_steps: int) -> list[Row]:
    """A row a way: the median over turns of a step's seconds, on the slowest rank."""
    sides = {way: Side(way, name, task, num_steps) for way in WAYS}
    seconds = seconds_in_turn(sides.values(), turns)
    sides["end"].handle.detach()
    rows: list[Row] = [
        {"way": way, "step_s": float(row.median())}
        for way, row in zip(WAYS, seconds, strict=True)
    ]
    lost: Row = {"way": "a rank is lost", "step_s": _lose_one(sides["shrink"])}
    root_store().set("they go on", "")
    while sides["shrink"].handle.world_size < dist.get_world_size():
        sides["shrink"].step(0)
    (joined,) = sides["shrink"].handle.stats()["joined"]
    reported: list[Row] = (
        [] if dist.get_rank() else json.loads(root_store().get("newcomer"))
    )
    return [
        *rows,
        lost,
        {"way": "others wait for a newcomer", "step_s": joined["seconds"]},
        *reported,
    ]


def come_in(name: str, task: TrainingTask) -> None:
    """Comes in where the last rank was lost, makes one step with the others, and tells
    rank 0.
    """
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False)
    store.wait(["they go on"])
    begin_s = time.perf_counter()
    side = Side("shrink", name, task, 1, store)
    rows = [{"way": "a newcomer's attach", "step_s": time.perf_counter() - begin_s}]
    side.step(0)
    rows += [
        {"way": "to its first whole step", "step_s": time.perf_counter() - begin_s}
    ]
    store.set("newcomer", json.dumps(rows))


def _lose_one(side: Side) -> float:
    """The seconds from the end of the last rank to that of the survivors' next whole
    step.
    """
    ended = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank() == dist.get_world_size() - 1:
        store = dist.distributed_c10d._get_default_store()

        def end(_: Any) -> None:
            store.set("ended", repr(wall_clock()))
            leave(0)

        next(side.model.parameters()).register_hook(end)
    side.step(0)
    ended[0] = wall_clock() - float(
        dist.distributed_c10d._get_default_store().get("ended")
    )
    dist.all_reduce(ended, op=dist.ReduceOp.MAX, group=side.handle.group)
    return float(ended)


def main(
    task: str = "perceptron", compressor: str = "topk", turns: int = 5, steps: int = 8
) -> None:
    """Measures turns of so many steps; rank 0 prints."""
    torch.set_num_threads(1)
    made = make_task(task)
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    # the rank that is lost is a process below this one
    if is_last and (lost := os.fork()):
        os.waitpid(lost, 0)
        come_in(compressor, made)
        leave(0)
    dist.init_process_group("gloo")
    rows = measure(compressor, made, turns, steps)
    if dist.get_rank() == 0:
        print(plain(rows), flush=True)
    leave(0)  # the group of all ranks waits for the lost one where it is destroyed


if __name__ == "__main__":
    typer.run(main)
