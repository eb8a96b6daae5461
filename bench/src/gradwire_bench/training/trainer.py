"""Trainer: a model in training on one rank, whatever averages its gradients or
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..workloads.task import TrainingTask
from ..workloads.train import Schedule


def rate_of_adamw(optimizer: Optimizer) -> float:
    """The rate that suits AdamW where an optimizer has its own: about a tenth of
    SGD's.
    """
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
        task = self.task
        factor = self.schedule(self.steps_done)
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
