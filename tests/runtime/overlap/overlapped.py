"""Models and training loops of every usual kind, for the laws of the overlapped forward
pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer, lr_scheduler

from gradwire.runtime.overlap.overlap import Overlap
from tests.runtime.overlap.late_means import (
    LateMeans,
    Loop,
    Make,
    Rig,
    batches,
    run,
    same,
)

NUM_STEPS = 6


def momentum(model: nn.Module) -> Optimizer:
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> Optimizer:
    return optim.Adam(model.parameters(), lr=0.01)


def adamw_groups(model: nn.Module) -> Optimizer:
    """Matrices decay and vectors do not, so groups are not in order of registration."""
    params = list(model.parameters())
    return optim.AdamW(
        [
            {
                "params": [p for p in params if p.dim() < 2],
                "weight_decay": 0.0,
                "lr": 0.02,
            },
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        ],
        lr=0.01,
        fused=True,
    )


OPTIMIZERS = [momentum, adamw_groups]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def usual(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[float]:
    losses = []
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def zero_before_backward(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        loss = loss_of(model, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def none_by_hand(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        loss_of(model, x).backward()
        optimizer.step()
        for param in model.parameters():
            param.grad = None


def never_zeroed(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        loss_of(model, x).backward()
        optimizer.step()


def two_backwards(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    """Gradients accumulate over two exchanged backward passes."""
    for i, x in enumerate(batches(2 * NUM_STEPS)):
        loss_of(model, x).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()


def two_forwards(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    """No forward pass between two backward passes."""
    for x in batches(NUM_STEPS):
        one, two = loss_of(model, x), loss_of(model, x.flip(0) + 1)
        one.backward()
        two.backward()
        optimizer.step()
        optimizer.zero_grad()


def skipped_steps(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for i, x in enumerate(batches(NUM_STEPS)):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        if i % 3:
            optimizer.step()


def schedule_early(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[Any]:
    """The scheduler changes rates while the updates of the step before are on their
    way.
    """
    scheduler = lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=NUM_STEPS + 1
    )
    rates = []
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr())
    return [rates, scheduler.state_dict()["last_epoch"]]


def frozen_midway(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    """A parameter is frozen while its update is on its way, and later trained again."""
    first = next(model.parameters())
    for i, x in enumerate(batches(NUM_STEPS)):
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        first.requires_grad_(i not in (1, 2))


def groups_change(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    extra = nn.Parameter(torch.ones(3))
    for i, x in enumerate(batches(NUM_STEPS)):
        optimizer.zero_grad()
        (loss_of(model, x) + extra.square().sum()).backward()
        optimizer.step()
        if i == 1:
            optimizer.add_param_group({"params": [extra], "lr": 0.3})
        if i == 3:
            optimizer.param_groups[0]["lr"] = 0.5


def some_without_gradient(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    """By hand: one parameter is left out of each step, another gets a gradient of its
    own.
    """
    params = list(model.parameters())
    for i, x in enumerate(batches(NUM_STEPS)):
        loss_of(model, x).backward()
        params[i % len(params)].grad = None
        own = params[(i + 1) % len(params)]
        own.grad = torch.full_like(own, 0.25)
        optimizer.step()
        optimizer.zero_grad()


def step_in_autocast_model(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


OVERLAPPED: list[Loop] = [
    usual,
    zero_before_backward,
    none_by_hand,
    never_zeroed,
    two_backwards,
    two_forwards,
    skipped_steps,
    schedule_early,
    groups_change,
    some_without_gradient,
    step_in_autocast_model,
]


def clipped(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[Tensor]:
    norms = []
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        optimizer.step()
    return norms


def scaled(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[float]:
    """Every third step has an infinite loss, and the scaler skips it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scales = []
    for i, x in enumerate(batches(NUM_STEPS)):
        optimizer.zero_grad()
        loss = loss_of(model, x) * (math.inf if i % 3 == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def with_closure(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[float]:
    losses: list[float] = []
    for x in batches(NUM_STEPS):

        def closure(x: Tensor = x) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss.item()

        losses.append(optimizer.step(closure))  # type: ignore[arg-type]
    return losses


def stepped_twice(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()


def zero_to_zeros(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def exchanged_gradients(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    """Two parameters of one shape swap gradients before the step."""
    one, two = [p for p in model.parameters() if p.dim() == 1][:2]
    one, two = (one, two) if one.shape == two.shape else (two, two)
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        one.grad, two.grad = two.grad, one.grad
        optimizer.step()


def step_in_autocast(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(model, x).backward()
            optimizer.step()
        optimizer.zero_grad()


def hooked_step(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[float]:
    sums: list[float] = []
    first = next(model.parameters())
    optimizer.register_step_post_hook(lambda *_: sums.append(first.sum().item()))
    usual(model, optimizer, rig)
    return sums


def graph_of_gradients(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, x), create_graph=True)
        optimizer.step()
        for param in model.parameters():
            param.grad = None


FALLEN_BACK: dict[Loop, str] = {
    clipped: "clip_grad_norm_ at overlapped.py",
    scaled: "step at overlapped.py",
    stepped_twice: "twice",
    zero_to_zeros: "zero_grad at overlapped.py",
    step_in_autocast: "inside autocast",
    hooked_step: "step hooks",
}


def law(model: nn.Module, make: Make, loop: Loop) -> Overlap:
    """Late means, at the last moment and at random ones, leave what plain training
    leaves.
    """
    expected, _ = run(model, make, loop, None)
    for seed in (None, 0):
        found, rig = run(model, make, loop, LateMeans(seed))
        assert same(found, expected)
        assert not any(p.isnan().any() for p in found["model"].values())
    assert rig.overlap is not None
    return rig.overlap


def evaluating(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[Tensor]:
    outputs = []
    for i, x in enumerate(batches(NUM_STEPS)):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        if i % 2:
            model.eval()
            with torch.inference_mode() if i % 3 else torch.no_grad():
                outputs.append(model(x).clone())
            model.train()
    return outputs
