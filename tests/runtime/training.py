"""What the ranks train: small models, data that differs from rank to rank, and the
plain loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.contract.registry import examples, homes, load
from gradwire.exchange.by_name import exchange_for

SMALL_MB = 0.004
"""A bucket_cap_mb of about one thousand elements: several messages even for these
models.
"""


def _exchanges() -> list[Exchange]:
    """Every algorithm's own exchange, and pairs of each kind with and without
    feedback.
    """
    codecs, together = gw.compress, gw.collective
    feedback, pair = gw.with_error_feedback, gw.pair
    first = {type(example): example for example in reversed(examples("compress"))}
    for codec, example in first.items():
        if isinstance(getattr(example, "threshold", None), float):
            first[codec] = codec(
                threshold=0.01
            )  # gradients of these models pass that often
        if codec.__name__ == "randomk":
            # 1 % at random learns too little
            first[codec] = codec(density=0.3, seed=1)
    return [
        *(exchange_for(algorithm) for algorithm in first.values()),
        *_by_casync_ring(),
        pair(codecs.none(), together.ring()),
        pair(codecs.none(), together.casync_ps()),
        pair(codecs.cast16(dtype=torch.float16), together.ring()),
        pair(codecs.topk(density=0.3), together.allgather_sparse()),
        feedback(pair(codecs.cast16(), together.allreduce())),
        feedback(pair(codecs.topk(density=0.3), together.casync_ps())),
        feedback(pair(codecs.onebit(block=64), together.casync_ps(room_bytes=0))),
        feedback(pair(codecs.onebit(block=64), together.casync_ps(partitions=1))),
        feedback(
            pair(
                codecs.onebit(block=64), together.casync_ps(partitions=1, room_bytes=0)
            )
        ),
    ]


def _by_casync_ring() -> list[Exchange]:
    """Pairs with the lab's collective, if it is installed."""
    if "casync_ring" not in homes("collective"):
        return []
    ring = load("collective", "casync_ring")
    codecs = gw.compress
    lossy = [
        (codecs.cast16(dtype=torch.float16), ring()),
        (codecs.onebit(block=64), ring()),
        (codecs.topk(density=0.3), ring()),
        (codecs.onebit(block=64), ring(partitions=1)),
        (codecs.onebit(block=64), ring(half_bytes=0)),
    ]
    by_feedback = [gw.with_error_feedback(gw.pair(*both)) for both in lossy]
    return [gw.pair(codecs.none(), ring()), *by_feedback]


EXCHANGES = _exchanges()
DENSE = exchange_for(gw.compress.none())
ONEBIT = exchange_for(gw.compress.onebit(block=64))
TOPK = exchange_for(gw.compress.topk(density=0.1))
CHOSEN = (DENSE, ONEBIT, TOPK)
"""One lossless, one dense and lossy, one sparse and lossy; the lossy ones with
feedback.
"""


def named(exchange: Exchange) -> str:
    """A short id for pytest."""
    text = repr(exchange)
    for long, short in (
        ("ErrorFeedback(inner=", "feedback("),
        ("Pair(codec=", "("),
        ("collective=", ""),
        ("torch.", ""),
    ):
        text = text.replace(long, short)
    return text.replace("\n", "")


class Net(nn.Module):
    """A classifier with matrices, vectors, odd sizes and a batch norm's buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        # No bias before the batch norm: its gradient would be zero but for rounding.
        self.first = nn.Linear(13, 37, bias=False)
        self.norm = nn.BatchNorm1d(37)
        self.middle = nn.Linear(37, 41, bias=False)
        self.deep = nn.Linear(41, 29)
        self.last = nn.Linear(29, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.tanh(self.deep(torch.relu(self.middle(x)))))  # type: ignore[no-any-return]


def batch(rank: int, step: int, *, size: int = 8) -> tuple[Tensor, Tensor]:
    """A rank's own data of one step: a fixed rule with noise, learnable by ``Net``."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 13, generator=generator)
    return x, (x[:, :5] + 0.1 * torch.randn(size, 5, generator=generator)).argmax(1)


def everything(name: str, param: Tensor) -> bool:
    """For ``compress_if``."""
    return True


def momentum(params: Iterable[Tensor]) -> Optimizer:
    return SGD(params, lr=0.05, momentum=0.9)


def adamw(params: Iterable[Tensor]) -> Optimizer:
    return AdamW(params, lr=3e-3, weight_decay=0.1)


def swift(params: Iterable[Tensor]) -> Optimizer:
    """One that has learnt something after 20 steps."""
    return AdamW(params, lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "momentum": momentum,
    "adamw": adamw,
}


def ddp(model: nn.Module, **settings: Any) -> DistributedDataParallel:
    """The model under DDP, in several buckets."""
    return DistributedDataParallel(model, **{"bucket_cap_mb": SMALL_MB, **settings})


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return F.cross_entropy(model(x), y)


def train(
    model: nn.Module, optimizer: Optimizer, rank: int, steps: Iterable[int]
) -> list[float]:
    """The unchanged loop of a user; returns the losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def digest(tensors: nn.Module | Iterable[Tensor]) -> str:
    """The bits of all parameters of a model, or of some tensors."""
    if isinstance(tensors, nn.Module):
        tensors = tensors.parameters()
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(
            tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return whole.hexdigest()


def gradients(model: nn.Module) -> list[Tensor | None]:
    """Copies of all gradients."""
    return [
        None if p.grad is None else p.grad.detach().clone() for p in model.parameters()
    ]
