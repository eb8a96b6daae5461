"""Training loops that read or write weights by hand, between ``optimizer.step()`` and forward."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from tests.runtime.late_means import Loop, Rig, batches
from tests.runtime.overlapped import NUM_STEPS, loss_of


def averaged(model: nn.Module, optimizer: Optimizer, rig: Rig) -> Any:
    """A running average of the weights, by torch's own class."""
    average = AveragedModel(model)
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        average.update_parameters(model)
    return average.module.state_dict()


def averaged_at_once(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[Tensor]:
    """Likewise by hand, in one call for all of them."""
    params = list(model.parameters())
    average = [p.detach().clone() for p in params]
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, params, 0.5)
    return average


def averaged_through_data(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[Tensor]:
    average = [p.detach().clone() for p in model.parameters()]
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        for mean, (_, param) in zip(average, model.named_parameters(), strict=True):
            mean.mul_(0.9).add_(param.data, alpha=0.1)
    return average


def clamped(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        for param in model.parameters():
            param.data.clamp_(-0.2, 0.2)


def clamped_in_place(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.2, 0.2)


def copied(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[Any]:
    """The best model so far, kept after every step."""
    kept = []
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        kept.append(copy.deepcopy(model).state_dict())
    return kept


def converted(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    """To another place or dtype and back, as some programs do around evaluation."""
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        model.double().float()


def logged_weights(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[float]:
    sums = []
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        sums.append(sum(p.norm().item() for p in optimizer.param_groups[0]["params"]))
    return sums


BETWEEN: dict[Loop, str] = {
    averaged: "update_parameters at between_steps.py",
    averaged_at_once: "_foreach_lerp_ at between_steps.py",
    averaged_through_data: "data at between_steps.py",
    clamped: "data at between_steps.py",
    clamped_in_place: "clamp_ at between_steps.py",
    copied: "deepcopy",
    converted: "double at between_steps.py",
    logged_weights: "norm at between_steps.py",
}
"""Each with what the reason of its fall-backs names."""
