"""What the demo trains: a real model on real data that this machine has, the same on every rank."""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import InvalidSetting, invalid

FASHION = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts its files."""


@dataclass(frozen=True)
class Task:
    """A model, its training batches and its held-out loss.

    ``batch(step, rank, world)`` gives one rank's inputs and targets, the same for every method that
    is compared; ``held_out`` is one fixed batch that is never trained on.
    """

    name: str
    description: str
    make_model: Callable[[], nn.Module]
    batch: Callable[[int, int, int], tuple[Tensor, Tensor]]
    held_out: tuple[Tensor, Tensor]
    learning_rate: float

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        scores = model(inputs)
        return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def available() -> list[str]:
    """Tasks whose data this machine has, the preferred one first."""
    return ["fashion", "text"] if FASHION.is_dir() else ["text"]


def make_task(name: str) -> Task:
    """The task ``text`` or ``fashion``; refuses one whose data is missing."""
    if name == "text":
        return _text()
    if name == "fashion":
        if not FASHION.is_dir():
            raise InvalidSetting(
                "the fashion task needs Fashion-MNIST, which is not on this machine; "
                "apt-get install dataset-fashion-mnist, or use --task text"
            )
        return _fashion()
    raise invalid("task", name, "text, fashion or auto", "leave it out to have it chosen")


class ByteLM(nn.Module):
    """A causal transformer over bytes: 4 layers of width 256, 3.3 M parameters."""

    def __init__(self, context: int = 64, width: int = 256, num_layers: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, 256)
        mask = torch.full((context, context), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTD = self.bytes(tokens_BT) + self.places
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD, src_mask=self.mask)
        scores_BTV: Tensor = self.scores(self.norm(hidden_BTD))
        return scores_BTV


def _text(context: int = 64, batch: int = 2) -> Task:
    """Python's own documentation topics, byte by byte: 0.7 MB that every Python has."""
    spec = importlib.util.find_spec("pydoc_data.topics")
    assert spec is not None
    assert spec.origin is not None
    text_N = torch.tensor(list(Path(spec.origin).read_bytes()), dtype=torch.uint8)
    held_out_from = text_N.numel() * 9 // 10

    def take(starts: Tensor) -> tuple[Tensor, Tensor]:
        window = text_N[starts[:, None] + torch.arange(context + 1)].long()
        return window[:, :-1], window[:, 1:]

    def draw(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(step * world + rank)
        return take(torch.randint(0, held_out_from - context - 1, (batch,), generator=random))

    random = torch.Generator().manual_seed(-1)
    last = text_N.numel() - context - 1
    held_out = take(torch.randint(held_out_from, last, (32,), generator=random))
    description = (
        f"byte-level transformer on Python's documentation topics, {batch} x {context} bytes a rank"
    )
    return Task("text", description, lambda: ByteLM(context), draw, held_out, 1e-3)


def _fashion(batch: int = 32) -> Task:
    """Fashion-MNIST with a small convolutional network of 3.2 M parameters."""
    images_NP = _read_idx(FASHION / "train-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)
    labels_N = _read_idx(FASHION / "train-labels-idx1-ubyte.gz", 8)
    test = _read_idx(FASHION / "t10k-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)[:512]
    test_labels = _read_idx(FASHION / "t10k-labels-idx1-ubyte.gz", 8)[:512]

    def draw(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(step * world + rank)
        at = torch.randint(0, len(images_NP), (batch,), generator=random)
        return images_NP[at].float() / 255, labels_N[at].long()

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

    description = f"convolutional network on Fashion-MNIST, {batch} images a rank"
    held_out = (test.float() / 255, test_labels.long())
    return Task("fashion", description, make_model, draw, held_out, 1e-3)


def _read_idx(path: Path, header_bytes: int) -> Tensor:
    """An idx file's content as flat uint8 (http://yann.lecun.com/exdb/mnist, file formats)."""
    with gzip.open(path) as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)[header_bytes:]
