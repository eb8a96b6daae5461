"""Training loops that read or write weights by hand, between ``optimizer.step()`` and
forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from tests.runtime.overlap.late_means import Loop, Rig, batches
from tests.runtime.overlap.overlapped import NUM_STEPS, loss_of


def trained(
    model: nn.Module, optimizer: Optimizer, between: Callable[[], object]
) -> None:
    """The usual loop, with something done to the weights after each step."""
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        between()


def averaged(model: nn.Module, optimizer: Optimizer, rig: Rig) -> Any:
    """A running average of the weights, by torch's own class."""
    average = AveragedModel(model)
    trained(model, optimizer, lambda: average.update_parameters(model))
    return average.module.state_dict()


def averaged_at_once(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[Tensor]:
    """Likewise by hand, in one call for all of them."""
    params = list(model.parameters())
    average = [p.detach().clone() for p in params]

    @torch.no_grad()
    def between() -> None:
        torch._foreach_lerp_(average, params, 0.5)

    trained(model, optimizer, between)
    return average


def clamped(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    trained(
        model, optimizer, lambda: [p.data.clamp_(-0.2, 0.2) for p in model.parameters()]
    )


@torch.no_grad()
def _clamp(model: nn.Module) -> None:
    for param in model.parameters():
        param.clamp_(-0.2, 0.2)


def clamped_in_place(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    trained(model, optimizer, lambda: _clamp(model))


def copied(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[Any]:
    """The best model so far, kept after every step."""
    kept: list[Any] = []
    trained(model, optimizer, lambda: kept.append(copy.deepcopy(model).state_dict()))
    return kept


def converted(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    """To another place or dtype and back, as some programs do around evaluation."""
    trained(model, optimizer, lambda: model.double().float())


BETWEEN: dict[Loop, str] = {
    averaged: "update_parameters at between_steps.py",
    averaged_at_once: "_foreach_lerp_ at between_steps.py",
    clamped: "data at between_steps.py",
    clamped_in_place: "clamp_ at between_steps.py",
    copied: "deepcopy",
    converted: "double at between_steps.py",
}
"""Each with what the reason of its fall-backs names."""
