"""Trainer: a model in training on one rank, whatever averages its gradients or
parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.runtime.handle import Handle

from ..workloads.task import TrainingTask
from ..workloads.train import Schedule


def rate_of_adamw(optimizer: Optimizer) -> float:
    """The rate that suits AdamW where an optimizer has its own: about a tenth of
    SGD's.
    """
    rate = float(optimizer.param_groups[0]["lr"])
    return rate / 10 if isinstance(optimizer, torch.optim.SGD) else rate


def under_ddp(
    model: nn.Module, hook: Any = None, state: object = None, **settings: Any
) -> DistributedDataParallel:
    """The model under DDP, which averages by a hook if one is given."""
    made = DistributedDataParallel(model, **settings)
    if hook is not None:
        made.register_comm_hook(state, hook)
    return made


def under_powersgd(model: nn.Module, first: int, rank: int) -> DistributedDataParallel:
    """The model under DDP with torch's PowerSGD, which begins after ``first`` steps.

    It has one bucket. With more it hangs on gloo: collectives of one bucket wait in
    callbacks for another's.
    """
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=first
    )
    return under_ddp(model, powerSGD_hook.powerSGD_hook, state, bucket_cap_mb=1e6)


@dataclass
class TurnRun:
    """A model that takes turns with others, and how many steps it has taken."""

    model: nn.Module
    optimizer: Optimizer
    handle: Handle | None
    step: int = 0

    def train_step(self, task: TrainingTask) -> Tensor:
        """Takes a step on this rank's batch; returns its loss."""
        batch = task.batch(self.step, dist.get_rank(), dist.get_world_size())
        self.optimizer.zero_grad()
        loss = task.loss(self.model, *batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.step += 1
        return loss


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
        if task.max_norm is not None:
            nn.utils.clip_grad_norm_(self.plain.parameters(), task.max_norm)
        self.optimizer.step()
        self.after_step()
        self.steps_done += 1
