"""Adapters on a frozen base under activation checkpoints, each rank with another one.

Adapter trainers meet three features at once: frozen layers, parameters that a batch
does not use, and checkpoints. Reported as huggingface/peft 527, 663 and 951.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from gradwire.errors import LoopMistake
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.multi


class Block(nn.Module):
    """A frozen layer and two adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(8, 2, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2, 8, bias=False) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return torch.tanh(self.base(x) + self.up[which](self.down[which](x)))


def blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(2))


def loss_of(model: nn.ModuleList, x: Tensor, which: int, *, reentrant: bool) -> Tensor:
    x = x.clone().requires_grad_()  # as enable_input_require_grads does
    for block in model:
        x = checkpoint(block, x, which, use_reentrant=reentrant)  # type: ignore[assignment]
    return x.square().mean()


def mean_of(param: Tensor) -> Tensor:
    total = torch.zeros_like(param) if param.grad is None else param.grad.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def trained(rank: int, world: int, reentrant: bool, locally: bool) -> str:
    """The error of a training whose ranks use other adapters in each step."""
    model = blocks()
    alone = blocks()
    adapters = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(adapters, lr=0.0)
    handle: Any = (
        gw.local_steps(model, optimizer, "none", every=2)
        if locally
        else gw.attach(model, "none")
    )
    draws = torch.Generator().manual_seed(rank)
    text = ""
    try:
        for step in range(3):
            x = torch.randn(4, 8, generator=draws)
            for one in (model, alone):
                one.zero_grad()
                which = (step + rank) % 2
                loss_of(one, x, which, reentrant=reentrant).backward()
            optimizer.step()
            if locally:
                continue
            for param, own in zip(model.parameters(), alone.parameters(), strict=True):
                if own.requires_grad:
                    assert param.grad is not None
                    assert torch.allclose(param.grad, mean_of(own), atol=1e-6)
    except LoopMistake as error:
        text = str(error)
    handle.detach()
    return text


@pytest.mark.parametrize("reentrant", [False, True], ids=["new", "reentrant"])
def test_adapters_under_checkpoints_are_averaged_or_refused_by_name(
    reentrant: bool, two: Ranks
) -> None:
    for text in two.run(trained, reentrant, False):
        assert ("use_reentrant=False is accepted" in text) == reentrant
        assert bool(text) == reentrant
    # local steps hook no backward pass
    assert two.run(trained, reentrant, True) == ["", ""]
