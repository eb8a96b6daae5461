"""Awkward models: shared, frozen, unused, mixed, tiny and sparse parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.runtime.training import Net, gradients, loss_of


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.middle.requires_grad_(False)
        self.last.bias.requires_grad_(False)


class Tied(nn.Module):
    """One matrix used twice, registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start = nn.Linear(13, 30)
        self.one = nn.Linear(30, 30)
        self.two = nn.Linear(30, 30)
        self.two.weight = self.one.weight
        self.last = nn.Linear(30, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.two(torch.tanh(self.one(torch.tanh(self.start(x))))))  # type: ignore[no-any-return]


class Branches(nn.Module):
    """Two branches; ``choose`` says which ones take part in the coming forward pass."""

    def __init__(self, choose: Callable[[int], tuple[bool, bool]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start = nn.Linear(13, 30)
        self.left, self.right = nn.Linear(30, 40), nn.Linear(30, 40)
        self.last = nn.Linear(40, 5)
        self._choose, self._step = choose, 0

    def forward(self, x: Tensor) -> Tensor:
        left, right = self._choose(self._step)
        self._step += 1
        x = torch.tanh(self.start(x))
        y = torch.zeros(x.shape[0], 40)
        if left:
            y = y + self.left(x)
        if right:
            y = y + self.right(x)
        return self.last(torch.relu(y))  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """bfloat16, float32 and float64 layers in one model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.low = nn.Linear(13, 30, dtype=torch.bfloat16)
        self.usual = nn.Linear(30, 30)
        self.high = nn.Linear(30, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.low(x.bfloat16())).float()
        return self.high(torch.tanh(self.usual(x)).double())  # type: ignore[no-any-return]


class OneElement(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :5] * self.only


class Recomputed(Net):
    """Activations of the middle are computed again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return torch.tanh(self.deep(torch.relu(self.middle(x))))

        x = torch.tanh(self.norm(self.first(x)))
        return self.last(checkpoint(inner, x, use_reentrant=False))  # type: ignore[no-any-return]


class Words(nn.Module):
    """A sparse embedding; ``rows`` are the words of the coming batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 6, sparse=True)
        self.bag = nn.EmbeddingBag(20, 6, mode="sum", sparse=True)
        self.last = nn.Linear(6, 5)
        self.rows = torch.zeros(0, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        found = (
            self.table(self.rows).sum(0)
            + self.bag(self.rows % 20, torch.tensor([0]))[0]
        )
        return self.last(found + x[:, :6])  # type: ignore[no-any-return]


def sparse_rows(rank: int, model: nn.Module, no_sync: Any) -> list[Tensor | None]:
    inner = getattr(model, "module", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: list[Tensor | None] = []
    for step in range(4):
        # Repeated words, other words on each rank, and no word at all on rank 1 in
        # steps 1 and 3.
        words = [(7 * step + rank) % 50, 3, 3, (step * step + 2 * rank) % 50]
        inner.rows = torch.tensor(
            [] if rank == 1 and step % 2 else words, dtype=torch.int64
        )
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        kept += [
            None if g is None else g.coalesce() if g.is_sparse else g
            for g in gradients(model)
        ]
        optimizer.step()
    return [*kept, *(p.detach() for p in model.parameters())]
