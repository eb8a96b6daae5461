"""Trainer: a model in training on one rank, whatever averages its gradients or parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..workloads.task import TrainingTask
from ..workloads.train import Schedule

# ---- Muon with AdamW ---------------------------------------------------------------------------
#
# Torch's Muon for the matrices of a model, AdamW for all else.
#
# Muon (Jordan et al., 2024) steps a matrix by its momentum, made orthogonal.

TIMES_RATE = 10
"""The rate of orthogonal steps over one that suits AdamW: Muon's 0.02 and Dion's 0.01 are usual
beside 0.001 or 0.002."""


class MuonWithAdamW(Optimizer):
    """One optimizer of two, of all parameters of a model.

    A convolution's kernels are a matrix with a row for each channel that comes out.
    """

    def __init__(self, model: nn.Module, rate: float) -> None:
        matrices = hidden(model)
        chosen = set(matrices)
        others = [param for param in model.parameters() if param not in chosen]
        groups = [
            {"params": matrices, "lr": TIMES_RATE * rate},
            {"params": others, "lr": rate},
        ]
        super().__init__(groups, {})
        # Torch's Muon takes matrices alone, so it is given views of the same memory.
        self._views = [nn.Parameter(param.detach().flatten(1)) for param in matrices]
        self._parts: tuple[Optimizer, ...] = (
            torch.optim.Muon(self._views),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters; a closure is called once, before."""
        loss = None if closure is None else closure()
        for param, view in zip(self.param_groups[0]["params"], self._views, strict=True):
            view.grad = None if param.grad is None else param.grad.flatten(1)
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups[0]["lr"] = group["lr"]
            part.step()
        return loss


def hidden(model: nn.Module) -> list[nn.Parameter]:
    """The matrices and kernels of a model, but for tables, whose rows are taken one by one."""
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    return [param for param in model.parameters() if param.dim() >= 2 and param not in tables]


def rate_of_adamw(optimizer: Optimizer) -> float:
    """The rate that suits AdamW where an optimizer has its own: about a tenth of SGD's."""
    rate = float(optimizer.param_groups[0]["lr"])
    return rate / 10 if isinstance(optimizer, torch.optim.SGD) else rate


@dataclass
class Trainer:
    """A model in training on this rank, a step at a time.

    ``model`` is what is called, ``plain`` what is scored: the module within DDP.
    """

    task: TrainingTask
    model: nn.Module
    plain: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    after_backward: Callable[[], None] = lambda: None
    after_step: Callable[[], None] = lambda: None
    steps_done: int = 0

    def __post_init__(self) -> None:
        self._rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(self) -> None:
        """Takes one step on this rank's batch."""
        task, factor = self.task, self.schedule(self.steps_done)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = factor * rate
        batch = task.batch(self.steps_done, dist.get_rank(), dist.get_world_size())
        self.optimizer.zero_grad()
        task.loss(self.model, *batch).backward()  # type: ignore[no-untyped-call]
        self.after_backward()
        if task.max_norm is not None:
            nn.utils.clip_grad_norm_(self.plain.parameters(), task.max_norm)
        self.optimizer.step()
        self.after_step()
        self.steps_done += 1
