"""Tasks of the demo: a real model on real data that this machine has, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import InvalidSetting, invalid
from ..workloads import fashion_mnist, text
from ..workloads.task import Batch, TrainingTask, class_loss, mean_over, random_of
from ..workloads.transformer import CausalLM


def make_task(name: str) -> TrainingTask:
    """The task ``text``, ``perceptron`` or ``fashion``; refuses one whose data is missing.

    All are scored by the loss on one batch that is never trained on.
    """
    if name == "text":
        return _over_bytes()
    if name == "perceptron":
        return _next_byte()
    if name == "fashion":
        try:
            return _fashion()
        except InvalidSetting as error:
            raise InvalidSetting(f"{error}, or use --task text") from error
    raise invalid("task", name, "text, perceptron or fashion", "leave it out: text needs no data")


def _over_bytes(context: int = 64, batch: int = 2) -> TrainingTask:
    """Python's own documentation topics, byte by byte: every byte from those before it."""
    draw, held_out = _windows(context, batch, lambda window: (window[:, :-1], window[:, 1:]))
    return _task(
        "text",
        "byte-level transformer on Python's documentation topics, "
        f"{batch} x {context} bytes a rank",
        lambda: CausalLM(context),
        draw,
        held_out,
    )


def _next_byte(context: int = 64, batch: int = 32) -> TrainingTask:
    """The byte behind ``context`` others, by a perceptron of 5.1 M parameters.

    A step computes little for the bytes it sends, which is what slow links are worst for.
    """

    def make_model() -> nn.Module:
        return nn.Sequential(
            nn.Embedding(256, 16),
            nn.Flatten(),
            nn.Linear(16 * context, 2048),
            nn.ReLU(),
            nn.Linear(2048, 1280),
            nn.ReLU(),
            nn.Linear(1280, 256),
        )

    draw, held_out = _windows(context, batch, lambda window: (window[:, :-1], window[:, -1]))
    about = f"perceptron on Python's documentation topics, {batch} x {context} bytes a rank"
    return _task("perceptron", about, make_model, draw, held_out)


def _windows(
    context: int, batch: int, split: Callable[[Tensor], Batch]
) -> tuple[Callable[[int, int, int], Batch], Batch]:
    """Draws of ``context`` bytes and one more, and 32 of them that are held out.

    Of Python's own documentation topics: 0.7 MB that every Python has.
    """
    text_N = torch.tensor(list(text.topics()), dtype=torch.uint8)
    held_out_from = text_N.numel() * 9 // 10

    def take(starts: Tensor) -> Batch:
        return split(text_N[starts[:, None] + torch.arange(context + 1)].long())

    def draw(step: int, rank: int, world: int) -> Batch:
        last = held_out_from - context - 1
        return take(torch.randint(0, last, (batch,), generator=random_of(0, step, rank, world)))

    random = torch.Generator().manual_seed(-1)
    last = text_N.numel() - context - 1
    return draw, take(torch.randint(held_out_from, last, (32,), generator=random))


def _fashion(batch: int = 32) -> TrainingTask:
    """Fashion-MNIST with a small convolutional network of 3.2 M parameters."""
    train, test = fashion_mnist.load()

    def draw(step: int, rank: int, world: int) -> Batch:
        random = random_of(0, step, rank, world)
        at = torch.randint(0, len(train.labels_N), (batch,), generator=random)
        return train.images_NCHW[at].float() / 255, train.labels_N[at].long()

    def make_model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 64, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 14 * 14, 256),
            nn.ReLU(),
            nn.Linear(256, 10),
        )

    held_out = (test.images_NCHW[:512].float() / 255, test.labels_N[:512].long())
    description = f"convolutional network on Fashion-MNIST, {batch} images a rank"
    return _task("fashion", description, make_model, draw, held_out)


def _task(
    name: str,
    description: str,
    make_model: Callable[[], nn.Module],
    batch: Callable[[int, int, int], Batch],
    held_out: Batch,
) -> TrainingTask:
    return TrainingTask(
        name=name,
        description=description,
        make_model=make_model,
        make_optimizer=partial(torch.optim.AdamW, lr=1e-3, fused=True),
        batch=batch,
        loss=class_loss,
        score=lambda model: mean_over(model, class_loss, held_out, len(held_out[0])),
        metric="loss",
    )
