"""Muon with AdamW: torch's Muon for the matrices of a model, AdamW for all else.

Muon (Jordan et al., 2024) steps a matrix by its momentum, made orthogonal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

TIMES_RATE = 10
"""The rate of orthogonal steps over one that suits AdamW: Muon's 0.02 and Dion's 0.01 are usual
beside 0.001 or 0.002."""


class MuonWithAdamW(Optimizer):
    """One optimizer of two: its groups of parameters are those of torch's own."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        matrices = hidden_matrices(model)
        chosen = set(matrices)
        others = [param for param in model.parameters() if param not in chosen]
        muon = torch.optim.Muon(matrices, lr=TIMES_RATE * rate)
        adamw = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self._parts: tuple[Optimizer, ...] = (muon, adamw)
        # A group is the same dict here and there, so a rate that is set here holds there.
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters; a closure is called once, before."""
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The matrices of a model but for tables, from which rows are taken: those suit no Muon."""
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    return [param for param in model.parameters() if param.dim() == 2 and param not in tables]


def rate_of_adamw(optimizer: Optimizer) -> float:
    """The rate that suits AdamW where an optimizer has its own: about a tenth of SGD's."""
    rate = float(optimizer.param_groups[0]["lr"])
    return rate / 10 if isinstance(optimizer, torch.optim.SGD) else rate
