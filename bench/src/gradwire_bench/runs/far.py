r"""Steps between far hosts, in seconds: DDP, its hook and gradwire in one run, in turn.

gradwire testbed run --hosts 4 --rate 1gbit --delay 40 -- \
    python -m gradwire_bench.runs.far

The model is one layer of ``--width`` squared elements, or two with ``--layers 2``. A
turn is the median of its steps without the first ones; figures are of the slowest rank.
``shrink`` is ``uniform`` whose steps are confirmed, and ``local_steps`` is ``uniform``
with an exchange in each step.

With ``--near FOLDER`` on hosts without delay, it measures layers, links and codecs into
the folder, and no steps. With ``--predict FOLDER --ms 40`` it prints beside each
measured step what these figures predict for links of this delay.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from gradwire.cli.report.table import Row
from gradwire.compress.uniform import uniform
from gradwire.contract.registry import load
from gradwire.exchange.by_name import exchange_for
from gradwire.measure.layers import profile as profile_model
from gradwire.measure.links import measure_group_links
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import (
    DENSE,
    Chunk,
    ExchangeSetting,
    Plan,
    PlannedMessage,
)
from gradwire.planning.data.profile import Profile
from gradwire.planning.default_fusion import DEFAULT_CHANNELS, default_messages
from gradwire.planning.planner.auto.judgement import setting_of
from gradwire.planning.price import iteration_s
from gradwire.runtime.attach import attach
from gradwire.runtime.handle import Handle
from gradwire.runtime.local_steps.local_steps import local_steps
from gradwire.runtime.settings import FailurePolicy

DDP = "ddp"
HOOK = "ddp, fp16 hook"
SHRINK = "shrink"
LOCAL_STEPS = "local_steps"
COMPRESSORS = ("none", "uniform", "topk")
METHODS = (DDP, HOOK, *COMPRESSORS, SHRINK, LOCAL_STEPS)
PLAIN = "plain"
"""A model that exchanges nothing."""
WARM_UP = 3
"""The steps at the start of each turn that are not measured."""


class Side:
    """One model that takes turns."""

    def __init__(self, method: str, width: int, layers: int, num_steps: int) -> None:
        torch.manual_seed(0)
        stack = [nn.Linear(width, width) for _ in range(layers)]
        self.model: nn.Module = nn.Sequential(*stack)
        if method in (DDP, HOOK):
            wrapped = DistributedDataParallel(self.model)
            if method == HOOK:
                wrapped.register_comm_hook(None, fp16_compress_hook)
            self.model = wrapped
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.handle = self._attached(method)
        self._batch = torch.randn(8, width)
        self._num_steps = num_steps

    def _attached(self, method: str) -> Handle | None:
        """The handle of a method of gradwire's."""
        if method in (DDP, HOOK, PLAIN):
            return None
        if method == LOCAL_STEPS:
            return local_steps(self.model, self._optimizer, uniform(), every=1)
        if method == SHRINK:
            policy = FailurePolicy(on_failure="shrink")
            return attach(
                self.model, uniform(), optimizer=self._optimizer, failure=policy
            )
        return attach(self.model, load("compress", method)())

    def backward(self) -> None:
        """One forward and backward pass of one batch."""
        self._optimizer.zero_grad()
        loss: Any = self.model(self._batch).square().mean()
        loss.backward()

    def turn(self) -> float:
        """The seconds of a step, the median of one turn."""
        return median([self.step() for _ in range(self._num_steps)][WARM_UP:])

    def step(self) -> float:
        """The seconds of one step."""
        begin_s = time.perf_counter()
        self.backward()
        self._optimizer.step()
        return time.perf_counter() - begin_s


def measure(
    methods: Sequence[str], width: int, layers: int, turns: int, num_steps: int
) -> list[Row]:
    """A row for each method, with the median and the range of its turns."""
    sides = {name: Side(name, width, layers, num_steps) for name in methods}
    seconds = torch.zeros(len(sides), turns, dtype=torch.float64)
    for turn in range(turns):
        for place, side in enumerate(sides.values()):
            dist.barrier()
            seconds[place, turn] = side.turn()
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    for side in sides.values():
        if side.handle is not None:
            side.handle.detach()
    return [
        {
            "method": name,
            "step_s": float(row.median()),
            "lowest_s": float(row.min()),
            "highest_s": float(row.max()),
        }
        for name, row in zip(sides, seconds, strict=True)
    ]


SIZES_BYTES = tuple(2**power for power in (14, 17, 19, 20))


def write_near(folder: Path, width: int, layers: int) -> None:
    """Measures layers, links and codecs of near hosts; rank 0 writes them."""
    side = Side(PLAIN, width, layers, 0)
    profile = profile_model(side.model, side.backward, iterations=20)
    cluster = measure_group_links(
        lambda share, note: None,
        compressors=COMPRESSORS[1:],
        sizes_bytes=SIZES_BYTES,
        budget_s=0.05,
    )
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        profile.save(folder / "profile.json")
        cluster.save(folder / "cluster.json")


def predicted(folder: Path, latency_s: float) -> dict[str, float]:
    """Seconds of a step by each method of gradwire, between hosts of this latency."""
    profile = Profile.load(folder / "profile.json")
    near = Cluster.load(folder / "cluster.json")
    far = near.scaled(latency_s=near.latency_s + latency_s)
    return {
        method: iteration_s(_plan(method, profile, far.num_ranks), profile, far)
        for method in COMPRESSORS
    }


def _plan(method: str, profile: Profile, world: int) -> Plan:
    """The messages that ``attach`` sends by default."""
    params = [
        (tensor.name, torch.empty(tensor.shape, device="meta"))
        for tensor in profile.tensors.values()
    ]
    exchange = exchange_for(load("compress", method)())
    exchanges: dict[str, ExchangeSetting] = {}
    if method != "none":
        exchanges = {method: setting_of(method)}
    messages = []
    for members, own in default_messages(params, exchange, world):
        chunks = [Chunk(tensor=one, start=0, stop=p.numel()) for one, p in members]
        name = method if exchanges and own is exchange else DENSE
        messages.append(PlannedMessage(chunks=tuple(chunks), exchange=name))
    return Plan(
        planner="far",
        model=profile.model,
        messages=tuple(messages),
        credit=DEFAULT_CHANNELS,
        exchanges=exchanges,
    )


def main() -> None:
    """Measures, and prints a table on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--near", type=Path)
    parser.add_argument("--predict", type=Path)
    parser.add_argument("--ms", type=float, default=0.0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if chosen.near is not None:
        write_near(chosen.near, chosen.width, chosen.layers)
        dist.destroy_process_group()
        return
    expected_s: dict[str, float] = {}
    if chosen.predict is not None:
        expected_s = predicted(chosen.predict, chosen.ms / 1e3)
    rows = measure(
        chosen.methods, chosen.width, chosen.layers, chosen.turns, chosen.steps
    )
    if dist.get_rank() == 0:
        for row in rows:
            method = str(row["method"])
            words = ""
            if method in expected_s:
                words = f", predicted {expected_s[method]:.4f} s"
            print(
                f"{method:14} {row['step_s']:.4f} s "
                f"({row['lowest_s']:.4f} to {row['highest_s']:.4f}){words}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
