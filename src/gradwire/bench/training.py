"""Training costs of compressors' errors: one small GPT, by each compressor, for the same steps.

All replicas train in one process, so losses and bytes are real and seconds are not measured. The
recipe is nanoGPT's: AdamW with weight decay on matrices, a warm-up, half a cosine, clipped norms;
nothing is tuned for any compressor. Messages are those that ``attach`` makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..compress.none import none
from ..contract import Compressor, Exchange
from ..errors import invalid
from ..exchange import exchange_for
from ..load import load, names
from ..report.output import Report
from ..report.table import Row
from ..workloads import text
from ..workloads.gpt import GPT
from ..workloads.task import Batch as Examples
from ..workloads.task import TrainingTask, class_loss, mean_over, random_of
from ..workloads.train import History, train

CONTEXT, BATCH = 64, 4
"""Bytes of a window, windows a rank draws for a step."""


@dataclass(frozen=True, kw_only=True)
class TrainBench:
    """Settings of ``bench train``: ``only`` are names of compressors, all if it is empty."""

    ranks: int = 4
    steps: int = 400
    seed: int = 0
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, least in (("ranks", self.ranks, 2), ("steps", self.steps, 10)):
            if value < least:
                raise invalid(name, value, f"{least} or more", "leave it out")

    @property
    def algorithms(self) -> list[tuple[str, Compressor | Exchange]]:
        """Every compressor with its defaults, by its name."""
        return [(name, load("compress", name)()) for name in self.only or names("compress")]


def run(bench: TrainBench, report: Report = lambda fraction, what: None) -> list[Row]:
    """One row a compressor, the uncompressed training first."""
    task = bytes_gpt(bench.seed)
    todo = [("dense", none()), *bench.algorithms]
    rows: list[Row] = []
    for place, (name, algorithm) in enumerate(todo):

        def tell(done: float, what: str, place: int = place, name: str = name) -> None:
            report((place + done) / len(todo), f"{name}: {what}")

        history = train(
            task,
            exchange_for(algorithm),
            world=bench.ranks,
            num_steps=bench.steps,
            num_warm_up=bench.steps // 10,
            as_attached=True,
            report=tell,
        )
        rows.append(_row(name, history, rows))
    return rows


def _row(name: str, history: History, before: Sequence[Row]) -> Row:
    loss = history.scores[-1][1]
    sent = sum(history.sent_bytes) / len(history.sent_bytes)
    dense = before[0] if before else {"loss": loss, "sent_bytes_per_step": sent}
    return {
        "name": name,
        "loss": loss,
        "loss_over_dense": loss / float(str(dense["loss"])),
        "sent_bytes_per_step": sent,
        "sent_over_dense": sent / float(str(dense["sent_bytes_per_step"])),
    }


def bytes_gpt(seed: int = 0) -> TrainingTask:
    """A GPT of 0.12 M parameters over the bytes of Python's documentation topics."""
    text_N = torch.tensor(list(text.topics()), dtype=torch.uint8)
    held_out_from = text_N.numel() * 9 // 10

    def windows(starts_B: Tensor) -> Examples:
        window = text_N[starts_B[:, None] + torch.arange(CONTEXT + 1)].long()
        return window[:, :-1], window[:, 1:]

    def draw(step: int, rank: int, world: int) -> Examples:
        random = random_of(seed, step, rank, world)
        return windows(torch.randint(held_out_from - CONTEXT - 1, (BATCH,), generator=random))

    random = torch.Generator().manual_seed(-1)
    last = text_N.numel() - CONTEXT - 1
    held_out = windows(torch.randint(held_out_from, last, (64,), generator=random))
    return TrainingTask(
        name="gpt",
        description=f"GPT over bytes of Python's documentation, {BATCH} x {CONTEXT} bytes a rank",
        make_model=lambda: GPT(CONTEXT),
        make_optimizer=partial(_adamw, rate=1e-3),
        batch=draw,
        loss=class_loss,
        score=lambda model: mean_over(model, class_loss, held_out, 64),
        metric="loss",
        seed=seed,
        max_norm=1.0,
    )


def _adamw(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
