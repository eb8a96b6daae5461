"""Outer steps under partial rounds, on a virtual clock: held-out loss at equal steps.

python -m gradwire_bench.runs.outer_steps

Learners train a model of bytes, by AdamW, on Python's documentation topics. Each run
has as many local steps in all. In "lock step" all learners are in each round, and
messages take no time. Otherwise half of the learners close a round, messages take three
steps of a fast learner, and at "1:4" half of the learners take four times as long for a
step. The scored model is the mean of all learners' parameters.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW

from gradwire.cli.report.table import Row
from gradwire.compress.none import none
from gradwire.contract import Compressor
from gradwire.contract.registry import load
from gradwire.contract.spec import TensorSpec
from gradwire.exchange.rounds import (
    FragmentLearner,
    FragmentOwner,
    PartialRounds,
    RoundCodec,
    Rules,
)
from gradwire_lab.exchange.virtual_rounds import VirtualClock, VirtualRank, stepping

from ..workloads import text
from ..workloads.task import random_of

OUTER_STEPS: dict[str, Any] = {
    "Nesterov 0.7/0.9": partial(SGD, lr=0.7, momentum=0.9, nesterov=True),
    "plain, lr 1": partial(SGD, lr=1.0),
    "plain, lr 0.28": partial(SGD, lr=0.28),
    "SlowMo 0.4": partial(SGD, lr=1.0, momentum=0.4),
}
LOCK_STEP = "lock step"
PACES = (LOCK_STEP, "1:1", "1:4")
CONTEXT = 8
"""The bytes that the model sees."""
BATCH = 32
EVERY = 10
DELAY = 3.0
"""Steps of a fast learner that a message takes."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run, but for its seed."""

    outer: str = "plain, lr 1"
    pace: str = LOCK_STEP
    learners: int = 2
    steps: int = 1200
    merge: str = "mean"
    codec: Compressor = field(default_factory=none)


class Bytes(nn.Module):
    """Scores of the next byte from the last ones: an embedding and a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.hidden = nn.Linear(16 * CONTEXT, 128)
        self.scores = nn.Linear(128, 256)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        hidden_BD = functional.relu(self.hidden(self.embedding(bytes_BT).flatten(1)))
        scores_BV: Tensor = self.scores(hidden_BD)
        return scores_BV


class Learner:
    """A model whose parameters are views of two flat fragments, and its batches."""

    def __init__(self, setting: Setting, rank: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Bytes()
        params = list(self.model.parameters())
        groups = (params[:3], params[3:])
        self.flats = [
            torch.cat([p.detach().flatten() for p in group]) for group in groups
        ]
        for group, flat in zip(groups, self.flats, strict=True):
            sizes = [p.numel() for p in group]
            for param, part in zip(group, torch.split(flat, sizes), strict=True):
                param.data = part.view_as(param)
        self._optimizer = AdamW(params, 2e-3, weight_decay=0.0, fused=True)
        self._draw = partial(random_of, seed, rank=rank, world=setting.learners)
        self._text_N = torch.frombuffer(bytearray(text.topics()), dtype=torch.uint8)

    def batch(self, first: int, last: int, random: torch.Generator) -> Iterator[Tensor]:
        """Inputs and targets that begin from ``first`` to ``last``."""
        starts_B = torch.randint(first, last, (BATCH,), generator=random)
        windows_BT = self._text_N[starts_B[:, None] + torch.arange(CONTEXT + 1)].long()
        yield windows_BT[:, :-1]
        yield windows_BT[:, -1]

    def train(self, step: int) -> int:
        """Makes a local step; returns its tokens."""
        end = self._text_N.numel() * 9 // 10
        inputs, targets = self.batch(0, end, self._draw(step))
        self._optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return BATCH

    @torch.no_grad()
    def score(self) -> float:
        """The loss on text that no learner trains on."""
        random = torch.Generator().manual_seed(0)
        numel = self._text_N.numel()
        batches = [
            self.batch(numel * 9 // 10, numel - CONTEXT - 1, random) for _ in range(200)
        ]
        return mean(
            float(functional.cross_entropy(self.model(inputs), targets))
            for inputs, targets in batches
        )


def rank_of(setting: Setting, learner: Learner, rank: int) -> VirtualRank:
    """A learner's part in the rounds."""
    world = setting.learners
    is_lock_step = setting.pace == LOCK_STEP
    rules = Rules(
        quorum=world if is_lock_step else world // 2,
        every=EVERY,
        fragments=len(learner.flats),
        merge=setting.merge,
    )
    learners = []
    owners = []
    for fragment, flat in enumerate(learner.flats):
        spec = TensorSpec("fragment", flat.numel())
        anchor_N = flat.clone()
        codec = RoundCodec(setting.codec, spec, rank, world)
        step = stepping(anchor_N, OUTER_STEPS[setting.outer])
        learners.append(FragmentLearner(rank, fragment, codec, rules, anchor_N, step))
        if fragment % world == rank:
            codec = RoundCodec(setting.codec, spec, rank, world)
            owners.append(FragmentOwner(fragment, codec, rules, world))
    rounds = PartialRounds(rank, learners, owners)
    return VirtualRank(rounds, learner.flats, learner.train)


def loss_of(setting: Setting, seed: int) -> float:
    """The held-out loss of the mean of all learners' parameters at the end."""
    world = setting.learners
    learners = [Learner(setting, rank, seed) for rank in range(world)]
    ranks = [rank_of(setting, learner, rank) for rank, learner in enumerate(learners)]
    delay = 0.0 if setting.pace == LOCK_STEP else DELAY
    slow_s = 4.0 if setting.pace == "1:4" else 1.0
    clock = VirtualClock(
        ranks,
        step_s=lambda rank: 1.0 if rank < world / 2 else slow_s,
        delay_s=lambda source, target, size: 0.0 if source == target else delay,
    )
    while sum(r.rounds.step for r in ranks) < setting.steps:
        clock.run(clock.now_s + 1.0)
    for flats in zip(*(learner.flats for learner in learners), strict=True):
        flats[0].copy_(torch.stack(flats).mean(0))
    return learners[0].score()


def measure(
    numbers: Iterable[int],
    seeds: Sequence[int],
    setting: Setting,
    outers: Sequence[str] = tuple(OUTER_STEPS),
) -> Iterator[Row]:
    """A row for each outer step and number of learners, with the losses by pace.

    Cells are means over seeds.
    """
    for learners in numbers:
        for outer in outers:
            row: Row = {"name": outer, "learners": learners}
            for pace in PACES:
                chosen = replace(setting, outer=outer, pace=pace, learners=learners)
                losses = [loss_of(chosen, seed) for seed in seeds]
                row[pace] = round(mean(losses), 3)
                row[f"{pace}, range"] = round(max(losses) - min(losses), 3)
            yield row


def main() -> None:
    """Measures as the command line says, and prints each row when it is there."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--learners", type=int, nargs="+", default=[2, 4, 8])
    options.add_argument("--outer", nargs="+", default=list(OUTER_STEPS))
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--steps", type=int, default=1200)
    options.add_argument("--merge", default="mean")
    options.add_argument("--compressor", default="none")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    setting = Setting(
        steps=chosen.steps,
        merge=chosen.merge,
        codec=load("compress", chosen.compressor)(),
    )
    seeds = range(chosen.seeds)
    for row in measure(chosen.learners, seeds, setting, chosen.outer):
        print(row, flush=True)


if __name__ == "__main__":
    main()
