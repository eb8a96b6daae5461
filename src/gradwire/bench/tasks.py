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
    """The task ``text``, ``perceptron``, ``lstm``, ``convnet`` or ``fashion``.

    ``fashion`` is refused where its images are missing; ``convnet`` then draws images of its own.
    All are scored by the loss on one batch that is never trained on.
    """
    if name == "text":
        return _over_bytes()
    if name == "perceptron":
        return _next_byte()
    if name == "lstm":
        return _by_lstm()
    if name == "convnet":
        return _drawn() if fashion_mnist.missing() else _fashion()
    if name == "fashion":
        try:
            return _fashion()
        except InvalidSetting as error:
            raise InvalidSetting(f"{error}, or use --task text") from error
    raise invalid("task", name, "text, perceptron, lstm, convnet or fashion", "leave it out")


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


class ByteLSTM(nn.Module):
    """A model of bytes (B, context) to scores (B, 256) of the next one: 3.4 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 128)
        self.lstm = nn.LSTM(128, 512, num_layers=2, batch_first=True)
        self.scores = nn.Linear(512, 256)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        hidden_BTD, _ = self.lstm(self.embedding(bytes_BT))
        scores_BV: Tensor = self.scores(hidden_BTD[:, -1])
        return scores_BV


def _by_lstm(context: int = 24, batch: int = 8) -> TrainingTask:
    """The byte behind ``context`` others, by a recurrent network: gradients come all at once."""
    draw, held_out = _windows(context, batch, lambda window: (window[:, :-1], window[:, -1]))
    about = f"LSTM on Python's documentation topics, {batch} x {context} bytes a rank"
    return _task("lstm", about, ByteLSTM, draw, held_out)


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


def _convnet() -> nn.Module:
    """A small convolutional network of 3.2 M parameters over images of 28 x 28."""
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


def _drawn(batch: int = 32) -> TrainingTask:
    """Drawn images, noise about one of ten others, which need no data."""
    kinds = torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))

    def images(count: int, random: torch.Generator) -> Batch:
        labels_N = torch.randint(10, (count,), generator=random)
        noise_NCHW = torch.randn(count, 1, 28, 28, generator=random)
        return kinds[labels_N] + 0.5 * noise_NCHW, labels_N

    def draw(step: int, rank: int, world: int) -> Batch:
        return images(batch, random_of(0, step, rank, world))

    held_out = images(512, torch.Generator().manual_seed(-1))
    about = f"convolutional network on drawn images, {batch} images a rank"
    return _task("convnet", about, _convnet, draw, held_out)


def _fashion(batch: int = 32) -> TrainingTask:
    """Fashion-MNIST with a small convolutional network."""
    train, test = fashion_mnist.load()

    def draw(step: int, rank: int, world: int) -> Batch:
        random = random_of(0, step, rank, world)
        at = torch.randint(0, len(train.labels_N), (batch,), generator=random)
        return train.images_NCHW[at].float() / 255, train.labels_N[at].long()

    held_out = (test.images_NCHW[:512].float() / 255, test.labels_N[:512].long())
    description = f"convolutional network on Fashion-MNIST, {batch} images a rank"
    return _task("fashion", description, _convnet, draw, held_out)


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
