"""Tasks of the demo and of ``bench train``: models on data that this machine has.

Every task trains by AdamW or by SGD with momentum, at a rate that suits uncompressed
training. All are scored by the loss on examples that are never trained on.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from gradwire.errors import InvalidSetting

from ..checks import check_names
from ..workloads import fashion_mnist, patterns, text
from ..workloads.convnet import ConvNet
from ..workloads.gpt import GPT
from ..workloads.lstm import LSTMLM
from ..workloads.task import Batch, TrainingTask, class_loss, mean_over, random_of
from ..workloads.transformer import CausalLM

CONTEXT = 64
"""Bytes of a window of text."""
_TOPICS = "Python's documentation topics"
_HELD_OUT = 64
"""Held-out examples that are scored at a time."""


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A task without its optimizer; ``rates`` are learning rates by optimizer."""

    description: str
    make_model: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    held_out: Batch
    rates: dict[str, float]
    max_norm: float | None = None


def make_task(
    name: str, optimizer: str = "adamw", *, times_rate: float = 1.0, seed: int = 0
) -> TrainingTask:
    """The task of a name in ``TASKS``, trained by an optimizer of ``OPTIMIZERS``.

    ``times_rate`` multiplies the learning rate that suits uncompressed training. Raises
    ``InvalidSetting`` for another name, and where the task's data is missing.
    """
    check_names("task", [name], TASKS)
    check_names("optimizer", [optimizer], OPTIMIZERS)
    made = TASKS[name](seed)
    return TrainingTask(
        name=name,
        description=made.description,
        make_model=made.make_model,
        make_optimizer=partial(
            OPTIMIZERS[optimizer], rate=times_rate * made.rates[optimizer]
        ),
        batch=made.batch,
        loss=class_loss,
        score=lambda model: mean_over(model, class_loss, made.held_out, _HELD_OUT),
        metric="loss",
        seed=seed,
        max_norm=made.max_norm,
    )


def _adamw(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """AdamW as nanoGPT has it: weights decay and vectors do not."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def _sgd(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def _text(seed: int) -> _Made:
    """Every byte from those before it."""
    return _of_text(
        seed,
        2,
        "byte-level transformer on",
        lambda: CausalLM(CONTEXT),
        {"adamw": 1e-3, "sgd": 0.03},
    )


def _perceptron(seed: int) -> _Made:
    """The byte behind ``CONTEXT`` others, by a perceptron of 5.1 M parameters.

    A step computes little for the bytes it sends, which is what slow links are worst
    for.
    """

    def make_model() -> nn.Module:
        return nn.Sequential(
            nn.Embedding(256, 16),
            nn.Flatten(),
            nn.Linear(16 * CONTEXT, 2048),
            nn.ReLU(),
            nn.Linear(2048, 1280),
            nn.ReLU(),
            nn.Linear(1280, 256),
        )

    return _of_text(
        seed,
        32,
        "perceptron on",
        make_model,
        {"adamw": 1e-3, "sgd": 0.05},
        split=lambda window: (window[:, :-1], window[:, -1]),
    )


def _gpt(seed: int) -> _Made:
    """A GPT of 0.12 M parameters, as nanoGPT trains it: clipped norms."""
    rates = {"adamw": 2e-3, "sgd": 0.1}
    made = _of_text(seed, 4, "GPT over bytes of", lambda: GPT(CONTEXT), rates, 64)
    return replace(made, max_norm=1.0)


def _lstm(seed: int) -> _Made:
    """An LSTM of 0.15 M parameters over bytes."""
    make_model = partial(LSTMLM, vocabulary=256, embedding=64, hidden=128)
    rates = {"adamw": 1e-2, "sgd": 2.0}
    made = _of_text(seed, 4, "LSTM over bytes of", make_model, rates, 64)
    return replace(made, max_norm=1.0)


def _convnet(seed: int, batch: int = 16) -> _Made:
    """A convolutional network of 0.21 M parameters on images that are generated."""

    def draw(step: int, rank: int, world: int) -> Batch:
        return patterns.draw(batch, random_of(seed, step, rank, world))

    return _Made(
        description="convolutional network on generated patterns, "
        f"{batch} images a rank",
        make_model=ConvNet,
        batch=draw,
        held_out=patterns.draw(1024, torch.Generator().manual_seed(-1)),
        rates={"adamw": 4e-3, "sgd": 0.04},
    )


def _fashion(seed: int, batch: int = 32) -> _Made:
    """Fashion-MNIST with a small convolutional network of 3.2 M parameters."""
    try:
        train, test = fashion_mnist.load()
    except InvalidSetting as error:
        raise InvalidSetting(f"{error}, or use --task text") from error

    def draw(step: int, rank: int, world: int) -> Batch:
        random = random_of(seed, step, rank, world)
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

    return _Made(
        description=f"convolutional network on Fashion-MNIST, {batch} images a rank",
        make_model=make_model,
        batch=draw,
        held_out=(test.images_NCHW[:512].float() / 255, test.labels_N[:512].long()),
        rates={"adamw": 1e-3, "sgd": 0.02},
    )


def _every_next(window_BT: Tensor) -> Batch:
    return window_BT[:, :-1], window_BT[:, 1:]


def _of_text(
    seed: int,
    batch: int,
    what: str,
    make_model: Callable[[], nn.Module],
    rates: dict[str, float],
    num_held_out: int = 32,
    split: Callable[[Tensor], Batch] = _every_next,
) -> _Made:
    """A task on draws of ``CONTEXT`` bytes and one more, of which some are held out.

    They come from Python's own documentation topics: 0.7 MB that every Python has.
    """
    text_N = torch.tensor(list(text.topics()), dtype=torch.uint8)
    held_out_from = text_N.numel() * 9 // 10
    last = text_N.numel() - CONTEXT - 1

    def take(starts_B: Tensor) -> Batch:
        return split(text_N[starts_B[:, None] + torch.arange(CONTEXT + 1)].long())

    def draw(step: int, rank: int, world: int) -> Batch:
        random = random_of(seed, step, rank, world)
        return take(
            torch.randint(held_out_from - CONTEXT - 1, (batch,), generator=random)
        )

    random = torch.Generator().manual_seed(-1)
    starts_B = torch.randint(held_out_from, last, (num_held_out,), generator=random)
    return _Made(
        description=f"{what} {_TOPICS}, {batch} x {CONTEXT} bytes a rank",
        make_model=make_model,
        batch=draw,
        held_out=take(starts_B),
        rates=rates,
    )


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
}
"""Optimizers by name, as functions of parameters and ``rate``."""
TASKS: dict[str, Callable[[int], _Made]] = {
    "text": _text,
    "perceptron": _perceptron,
    "fashion": _fashion,
    "gpt": _gpt,
    "lstm": _lstm,
    "convnet": _convnet,
}
"""Tasks by name, as functions of the seed of batches and first values."""
