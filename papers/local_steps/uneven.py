r"""Local steps of ranks of uneven speeds: in lock step, and with a quorum, in one run.

gradwire testbed run --hosts 4 --ranks-per-host 4 --rate 16.7mbit --slow 1=10.4mbit \
    --slow 2=14.5mbit --slow 3=4.5mbit -- python -m papers.local_steps.uneven

The environment is HALoS' (ICML 2025): 16 workers in 4 regions, with a local step of
238 ms over the worker's speed and 32 steps a period. Rates between regions and bytes of
the model are a hundredth of the paper's: a region's link has the sum of its rates to
the others. Pseudo-gradients have 4 bits. A worker makes its step on a small model, and
waits for the rest of its time.

Useful time is the share of all ranks' time that they spend in local steps. Both sides
make as many local steps in all, and all of them reach the anchors.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

from gradwire.cli.report.table import Row
from gradwire.compress.uniform import uniform
from gradwire.runtime.local_steps.local_steps import local_steps
from gradwire.runtime.local_steps.recipes import SLOWMO
from gradwire_bench.workloads import text
from gradwire_bench.workloads.task import random_of

STEP_S = 0.238391
SPEEDS = (
    *(0.232, 0.907, 0.828, 0.347),
    *(0.574, 0.531, 0.722, 0.194),
    *(0.852, 0.132, 0.896, 0.107),
    *(0.827, 0.515, 0.527, 0.788),
)
EVERY = 32
CONTEXT = 16
BATCH = 32
WIDTH = 280
SIDES: dict[str, dict[str, Any]] = {
    "quorum": {"fragments": 8},
    "quorum, SlowMo": {"fragments": 8, "outer": SLOWMO},
    "lock step": {},
    "lock step, SlowMo": {"outer": SLOWMO},
}
"""Settings of each side; a quorum is half of the ranks.

Ranks with a quorum know late how many steps all have made, so they make some more. The
next side makes as many.
"""


class Bytes(nn.Module):
    """Scores of the next byte from the last ones: 0.7 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.first = nn.Linear(16 * CONTEXT, WIDTH)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(7))
        self.scores = nn.Linear(WIDTH, 256)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        hidden_BD = functional.relu(self.first(self.embedding(bytes_BT).flatten(1)))
        for layer in self.hidden:
            hidden_BD = hidden_BD + functional.relu(layer(hidden_BD))
        scores_BV: Tensor = self.scores(hidden_BD)
        return scores_BV


class Worker:
    """A rank's model and its batches of Python's documentation topics."""

    def __init__(self, rank: int, world: int) -> None:
        torch.manual_seed(0)
        self.model = Bytes()
        self.optimizer = AdamW(self.model.parameters(), 1e-3, (0.9, 0.95))
        self.rank = rank
        self.world = world
        self._text_N = torch.frombuffer(bytearray(text.topics()), dtype=torch.uint8)

    def batch(self, first: int, last: int, random: torch.Generator) -> Iterator[Tensor]:
        """Inputs and targets that begin from ``first`` to ``last``."""
        starts_B = torch.randint(first, last, (BATCH,), generator=random)
        windows_BT = self._text_N[starts_B[:, None] + torch.arange(CONTEXT + 1)].long()
        yield windows_BT[:, :-1]
        yield windows_BT[:, -1]

    def gradients(self, step: int, step_s: float) -> float:
        """Makes gradients, waits until the step's time is over, and returns it."""
        begin_s = time.perf_counter()
        random = random_of(0, step, rank=self.rank, world=self.world)
        inputs, targets = self.batch(0, self._text_N.numel() * 9 // 10, random)
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        time.sleep(max(0.0, begin_s + step_s - time.perf_counter()))
        return time.perf_counter() - begin_s

    @torch.no_grad()
    def score(self) -> float:
        """The loss on text that no rank trains on."""
        random = torch.Generator().manual_seed(0)
        numel = self._text_N.numel()
        losses = []
        for _ in range(200):
            inputs, targets = self.batch(numel * 9 // 10, numel - CONTEXT - 1, random)
            losses.append(functional.cross_entropy(self.model(inputs), targets))
        return float(torch.stack(losses).mean())


def measure(side: str, num_steps: int, factor: float) -> Row:
    """A row: all ranks make ``num_steps`` local steps for each rank, on average."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    worker = Worker(rank, world)
    has_quorum = side.startswith("quorum")
    quorum = max(1, world // 2) if has_quorum else None
    handle: Any = local_steps(
        worker.model,
        worker.optimizer,
        uniform(),
        every=EVERY,
        quorum=quorum,
        **SIDES[side],
    )
    step_s = factor * STEP_S / SPEEDS[rank % len(SPEEDS)]
    dist.barrier()
    begin_s = time.perf_counter()
    useful_s = 0.0
    while (
        handle.steps_of_all < num_steps * world
        if has_quorum
        else handle.step < num_steps
    ):
        useful_s += worker.gradients(handle.step, step_s)
        worker.optimizer.step()
    trained_s = time.perf_counter() - begin_s
    handle.end_period()
    wall_s = time.perf_counter() - begin_s
    figures = handle.stats()
    sent_bytes = figures["wire_bytes_per_step"] * handle.step
    of_all = torch.tensor(
        [useful_s, wall_s, trained_s, handle.step, sent_bytes, figures["exchanges"]],
        dtype=torch.float64,
    )
    dist.all_reduce(of_all)
    handle.detach()
    useful_s, wall_s, trained_s, steps, sent_bytes, exchanges = of_all.tolist()
    return {
        "side": side,
        "useful": useful_s / wall_s,
        "wall_s": wall_s / world,
        "end_s": (wall_s - trained_s) / world,
        "steps": steps,
        "sent_mb": sent_bytes / world / 1e6,
        "exchanges": exchanges / world,
        "loss": worker.score(),
    }


def main() -> None:
    """Measures, and prints a row for each side on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=96, help="local steps a rank")
    parser.add_argument("--factor", type=float, default=1.0, help="times a step's time")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    num_steps = chosen.steps
    for side in chosen.sides:
        row: Any = measure(side, num_steps, chosen.factor)
        num_steps = round(row["steps"] / dist.get_world_size())
        if dist.get_rank() == 0:
            print(
                f"{side:22} useful {row['useful']:.3f}, {row['wall_s']:.1f} s "
                f"with {row['end_s']:.1f} s for the end, "
                f"{row['steps']:.0f} steps, {row['sent_mb']:.1f} MB a rank, "
                f"{row['exchanges']:.0f} merges, loss {row['loss']:.4f}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
