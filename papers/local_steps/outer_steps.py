"""Outer steps under partial rounds, on a virtual clock: held-out loss at equal tokens.

python -m papers.local_steps.outer_steps

Learners train a small GPT or LSTM, by AdamW, on Python's documentation topics. All runs
of a number of learners have as many local steps in all, so they see as many tokens. In
"lock step" all learners are in each round, and messages take no time. Otherwise half of
the learners close a round, messages take three steps of a fast learner, and at "1:4"
half of the learners take four times as long for a step. The learning rate follows the
local steps of all learners. The scored model is the mean of all learners' parameters.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import cos, pi
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from gradwire.cli.report.table import Row
from gradwire.compress.cast16 import cast16
from gradwire.compress.none import none
from gradwire.compress.onebit import onebit
from gradwire.compress.uniform import uniform
from gradwire.contract import Compressor
from gradwire.contract.spec import TensorSpec
from gradwire.exchange.rounds import (
    FragmentLearner,
    FragmentOwner,
    PartialRounds,
    RoundCodec,
    Rules,
)
from gradwire_bench.workloads import text
from gradwire_bench.workloads.gpt import GPT
from gradwire_bench.workloads.lstm import LSTMLM
from gradwire_bench.workloads.task import Batch, class_loss, mean_over, random_of
from gradwire_lab.compress.sparseloco import sparseloco
from gradwire_lab.exchange.virtual_rounds import (
    SteppedAnchor,
    VirtualClock,
    VirtualRank,
)


class DelayedNesterov(Optimizer):
    """SGD whose Nesterov momentum moves parameters in each ``every``-th step alone.

    In between parameters go a share of the gradient. Merges of few ranks point to
    different places, and their mean over ``every`` merges feeds the momentum.

    Source: Liu et al. 2024, arXiv 2401.09135, algorithm 3, with c = 0.

    Args:
        params: The parameters.
        lr: The learning rate.
        momentum: The share of the momentum that remains in each ``every``-th step.
        every: Steps from one step with momentum to the next.

    >>> param = nn.Parameter(torch.zeros(1))
    >>> optimizer = DelayedNesterov([param], lr=1.0, momentum=0.5, every=2)
    >>> for _ in range(2):
    ...     param.grad = torch.ones(1)
    ...     optimizer.step()
    ...     param.item()
    -0.5
    -1.5
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float, every: int
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every})
        self._number = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Makes a step; the closure is not called."""
        self._number += 1
        for group in self.param_groups:
            every = group["every"]
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                    state["sum"] = torch.zeros_like(param)
                state["sum"] += param.grad / every
                step_N = param.grad / every
                if self._number % every == 0:
                    state["momentum"].mul_(group["momentum"]).add_(state["sum"])
                    state["sum"].zero_()
                    step_N += group["momentum"] * state["momentum"]
                param.sub_(group["lr"] * step_N)


PLAIN = "plain, lr 1"
OUTER_STEPS: dict[str, Any] = {
    "Nesterov 0.7/0.9": partial(SGD, lr=0.7, momentum=0.9, nesterov=True),
    PLAIN: partial(SGD, lr=1.0),
    "plain, lr 0.5": partial(SGD, lr=0.5),
    "Nesterov 0.28/0.9": partial(SGD, lr=0.28, momentum=0.9, nesterov=True),
    "SlowMo 0.4": partial(SGD, lr=1.0, momentum=0.4),
    "delayed Nesterov": partial(DelayedNesterov, lr=0.7, momentum=0.9, every=2),
}
CONTEXT = 32
"""The bytes of a window."""
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": partial(GPT, CONTEXT, width=32, num_layers=1, num_heads=2),
    "lstm": partial(LSTMLM, 256, embedding=32, hidden=64),
}
RATES = {"gpt": 4e-3, "lstm": 2e-2}
LOCK_STEP = "lock step"
PACES = (LOCK_STEP, "1:1", "1:4")
BATCH = 4
EVERY = 10
DELAY = 3.0
"""Steps of a fast learner that a message takes."""


class Sent(NamedTuple):
    """A compressor of pushes and merges, and whether residuals keep its losses."""

    codec: Compressor
    is_kept: bool


FLOAT32 = "32 bits"
SENT: dict[str, Sent] = {
    FLOAT32: Sent(none(), False),
    "16 bits": Sent(cast16(), False),
    "16 bits, feedback": Sent(cast16(), True),
    "4 bits, blocks of 512": Sent(uniform(), False),
    "4 bits, blocks of 64": Sent(uniform(block=64), False),
    "4 bits, blocks of 64, feedback": Sent(uniform(block=64), True),
    "2 bits": Sent(sparseloco(density=1.0), False),
    "2 bits, feedback": Sent(sparseloco(density=1.0), True),
    "1 bit": Sent(onebit(stretch=1.0), False),
    "1 bit, feedback": Sent(onebit(stretch=1.0), True),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run, but for its seed."""

    model: str = "gpt"
    outer: str = PLAIN
    merge: str = "mean"
    sent: str = FLOAT32
    learners: int = 2
    pace: str = LOCK_STEP
    steps: int = 160
    """Local steps in all, over learners."""


class Learner:
    """A model whose parameters are views of two flat fragments, and its batches."""

    def __init__(self, setting: Setting, rank: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = MODELS[setting.model]()
        params = list(self.model.parameters())
        half = len(params) // 2
        groups = (params[:half], params[half:])
        self.shapes = [tuple(tuple(p.shape) for p in group) for group in groups]
        self.flats = [
            torch.cat([p.detach().flatten() for p in group]) for group in groups
        ]
        wholes = []
        for group, flat in zip(groups, self.flats, strict=True):
            whole = nn.Parameter(flat, requires_grad=False)
            whole.grad = torch.zeros_like(flat)
            sizes = [p.numel() for p in group]
            values = torch.split(flat, sizes)
            parts = zip(values, torch.split(whole.grad, sizes), strict=True)
            for param, (part, grad) in zip(group, parts, strict=True):
                param.data = part.view_as(param)
                param.grad = grad.view_as(param)
            wholes.append(whole)
        self.rate = RATES[setting.model]
        self.optimizer = AdamW(wholes, self.rate, weight_decay=0.0, fused=True)
        self._draw = partial(random_of, seed, rank=rank, world=setting.learners)
        self._text_N = torch.frombuffer(bytearray(text.topics()), dtype=torch.uint8)

    def batch(self, starts_B: Tensor) -> Batch:
        """Windows that begin here, and the next byte of each byte."""
        windows_BT = self._text_N[starts_B[:, None] + torch.arange(CONTEXT + 1)].long()
        return windows_BT[:, :-1], windows_BT[:, 1:]

    def train(self, step: int) -> int:
        """Makes a local step; returns its tokens."""
        end = self._text_N.numel() * 9 // 10 - CONTEXT
        starts_B = torch.randint(end, (BATCH,), generator=self._draw(step))
        self.optimizer.zero_grad(set_to_none=False)
        class_loss(self.model, *self.batch(starts_B)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return BATCH * CONTEXT

    def score(self) -> float:
        """The loss on text that no learner trains on."""
        last = self._text_N.numel() - CONTEXT - 1
        starts_B = torch.arange(last * 9 // 10 + CONTEXT, last, 4 * CONTEXT)
        return mean_over(self.model, class_loss, self.batch(starts_B), 64)


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
    sent = SENT[setting.sent]

    def codec_of(fragment: int) -> RoundCodec:
        numel = learner.flats[fragment].numel()
        spec = TensorSpec("fragment", numel, shapes=learner.shapes[fragment])
        codec = RoundCodec(sent.codec, spec, rank, world)
        if not sent.is_kept:
            codec.residual_N = None
        return codec

    def make_owner(fragment: int) -> FragmentOwner:
        return FragmentOwner(fragment, codec_of(fragment), rules, world)

    learners = []
    for fragment, flat in enumerate(learner.flats):
        anchor_N = flat.clone()
        outer = SteppedAnchor(anchor_N, OUTER_STEPS[setting.outer])
        learners.append(
            FragmentLearner(rank, fragment, codec_of(fragment), rules, anchor_N, outer)
        )
    rounds = PartialRounds(rank, world, learners, make_owner)
    return VirtualRank(rounds, learner.flats, learner.train)


def rate_at(share: float) -> float:
    """The factor of the learning rate: a short warm-up, then a cosine to a tenth.

    >>> [round(rate_at(share), 2) for share in (0.0, 0.025, 0.05, 1.0)]
    [0.0, 0.5, 1.0, 0.1]
    """
    return min(share / 0.05, 0.55 + 0.45 * cos(pi * max(0.0, share - 0.05) / 0.95))


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
    num_steps = setting.steps * world
    while (made := sum(r.rounds.step for r in ranks)) < num_steps:
        for learner in learners:
            factor = rate_at((made + world) / (num_steps + world))
            learner.optimizer.param_groups[0]["lr"] = factor * learner.rate
        clock.run(clock.now_s + 1.0)
    for flats in zip(*(learner.flats for learner in learners), strict=True):
        flats[0].copy_(torch.stack(flats).mean(0))
    return learners[0].score()


def settings_of(numbers: Iterable[int], steps: int) -> Iterator[Setting]:
    """All runs: outer steps by pace; with 4 learners merges and bits too."""
    for learners, model in product(numbers, MODELS):
        base = Setting(model=model, learners=learners, steps=steps)
        for outer, pace in product(OUTER_STEPS, PACES):
            yield replace(base, outer=outer, pace=pace)
        if learners == 4:
            for outer, pace in product((PLAIN, "plain, lr 0.5"), PACES[1:]):
                yield replace(base, outer=outer, merge="rda", pace=pace)
            for sent in SENT:
                if sent != FLOAT32:
                    yield replace(base, sent=sent, pace="1:4")


Losses = dict[Setting, list[float]]


def rows_of(losses: Losses) -> list[Row]:
    """A row for each run but for its pace: median loss and range by pace.

    Lock step's loss is over the best of lock step, and that of another pace over lock
    step's with the same outer step, in percent.
    """
    medians = {setting: median(values) for setting, values in losses.items()}
    best: dict[tuple[str, int], float] = defaultdict(lambda: float("inf"))
    for setting, loss in medians.items():
        if setting.sent == FLOAT32:
            key = (setting.model, setting.learners)
            best[key] = min(best[key], loss)
    rows: dict[Setting, Row] = {}
    for setting, loss in medians.items():
        whole = replace(setting, pace=LOCK_STEP)
        row = rows.setdefault(
            whole,
            {
                "name": setting.outer,
                "model": setting.model,
                "learners": setting.learners,
                "merge": setting.merge,
                "sent": setting.sent,
            },
        )
        lock_step = medians.get(replace(whole, merge="mean", sent=FLOAT32), loss)
        row[setting.pace] = round(loss, 3)
        row[f"{setting.pace}, range"] = round(
            max(losses[setting]) - min(losses[setting]), 3
        )
        row[f"{setting.pace}, % over lock step"] = round(
            100 * (loss / lock_step - 1), 1
        )
        row[f"{setting.pace}, % over best"] = round(
            100 * (loss / best[setting.model, setting.learners] - 1), 1
        )
    return list(rows.values())


def measure(settings: Iterable[Setting], seeds: Sequence[int]) -> list[Row]:
    """Runs all, and prints each run's losses when they are there."""
    losses: Losses = {}
    for setting in settings:
        losses[setting] = [loss_of(setting, seed) for seed in seeds]
        print(setting, losses[setting], flush=True)
    return rows_of(losses)


def main() -> None:
    """Measures as the command line says, and prints the rows."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--learners", type=int, nargs="+", default=[4, 2, 8])
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--steps", type=int, default=160)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    settings = settings_of(chosen.learners, chosen.steps)
    for row in measure(settings, range(chosen.seeds)):
        print(row)


if __name__ == "__main__":
    main()
