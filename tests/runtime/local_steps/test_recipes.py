"""Recipes: local steps with the settings that they state; Muon with AdamW is torch's
own two.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import gradwire as gw
from gradwire.runtime.local_steps.recipes import TIMES_RATE, MuonWithAdamW
from tests.each import each
from tests.runtime.ranks import Ranks


class Small(nn.Module):
    """A table, kernels, a matrix and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.kernels = nn.Embedding(8, 6), nn.Conv1d(1, 4, 3)
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.kernels(self.table(x)).flatten(1))
        return out


def model() -> Small:
    torch.manual_seed(0)
    return Small()


def test_steps_are_those_of_torchs_optimizers() -> None:
    ours, theirs = model(), model()
    optimizer = MuonWithAdamW(ours, 0.01)
    muon = torch.optim.Muon([theirs.last.weight], lr=TIMES_RATE * 0.01)
    others = [
        p
        for n, p in theirs.named_parameters()
        if n not in ("last.weight", "kernels.weight")
    ]
    adamw = torch.optim.AdamW(
        others, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    kernels = nn.Parameter(theirs.kernels.weight.detach().view(4, 3))
    of_kernels = torch.optim.Muon([kernels], lr=TIMES_RATE * 0.01)
    for step in range(3):
        x = torch.arange(10).remainder(8).view(10, 1) + torch.zeros(
            10, 1, dtype=torch.long
        )
        for net in (ours, theirs):
            net.zero_grad()
            net(x).square().mean().backward()
        if step == 2:  # a schedule
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            for one in (muon, adamw, of_kernels):
                one.param_groups[0]["lr"] *= 0.5
        assert theirs.kernels.weight.grad is not None
        kernels.grad = theirs.kernels.weight.grad.view(4, 3)
        for one in (optimizer, muon, adamw, of_kernels):
            one.step()
    for (name, own), other in zip(
        ours.named_parameters(), theirs.parameters(), strict=True
    ):
        assert torch.equal(own, other), name
    assert not torch.equal(ours.last.weight, model().last.weight)


def stepped(net: Small, optimizer: torch.optim.Optimizer, count: int) -> None:
    x = torch.arange(10).remainder(8).view(10, 1) + torch.zeros(10, 1, dtype=torch.long)
    for _ in range(count):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def test_a_saved_optimizer_goes_on_with_the_same_bits() -> None:
    ours, theirs = model(), model()
    one = MuonWithAdamW(ours, 0.01)
    stepped(ours, one, 3)
    theirs.load_state_dict(ours.state_dict())
    other = MuonWithAdamW(theirs, 0.5)
    other.load_state_dict(deepcopy(one.state_dict()))
    for net, optimizer in ((ours, one), (theirs, other)):
        stepped(net, optimizer, 2)
    for (name, own), same in zip(
        ours.named_parameters(), theirs.parameters(), strict=True
    ):
        assert torch.equal(own, same), name


def test_kernels_that_are_no_matrix_in_memory_are_refused() -> None:
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(gw.InvalidSetting, match="channels_last"):
        MuonWithAdamW(net, 0.01)


def test_a_torch_without_muon_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(gw.InvalidSetting, match=r"2\.9 or newer"):
        gw.recipes.muloco(model())


NESTEROV = {"momentum": 0.9, "nesterov": True}
LATE = {"fragments": 3, "delay": 5, "mixing": 0.5}
ADAMW = partial(AdamW, lr=4e-4, weight_decay=0.1)
SAME: dict[str, tuple[Any, str, Any, int, dict[str, Any]]] = {
    "localsgd": (partial(SGD, lr=0.1, momentum=0.9), "none", {"lr": 1.0}, 8, {}),
    "diloco": (ADAMW, "none", {"lr": 0.7, **NESTEROV}, 500, {}),
    "streaming_diloco": (ADAMW, "uniform", {"lr": 0.4, **NESTEROV}, 30, LATE),
    "muloco": (
        partial(MuonWithAdamW, rate=1e-3),
        "uniform",
        {"lr": 1.0, "momentum": 0.4},
        5,
        {},
    ),
}


def both_ways(rank: int, world: int, name: str) -> tuple[int, bool]:
    """Exchanges by a recipe, and whether what its docstring says has the same rhythm
    and bits.
    """
    make, exchange, outer, every, more = SAME[name]
    found, rhythms, counts = [], [], []
    for by_recipe in (True, False):
        net = model()
        if by_recipe:
            optimizer, handle = getattr(gw.recipes, name)(net)
        else:
            optimizer = make(net if name == "muloco" else net.parameters())
            settings = {"outer": partial(SGD, **outer), "every": every, **more}
            handle = gw.local_steps(net, optimizer, exchange, **settings)
        for step in range(min(every + 6, 36)):
            x = torch.full((10, 1), (rank + step) % 8)
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        counts.append(handle.stats()["exchanges"])
        rhythms.append(handle._rhythm)
        handle.end_period()
        found.append([param.detach().clone() for param in net.parameters()])
        handle.detach()
    same = all(map(torch.equal, *found))
    return counts[0], same and counts[0] == counts[1] and rhythms[0] == rhythms[1]


@pytest.mark.multi
@each("name", SAME)
def test_a_recipe_is_what_it_says(two: Ranks, name: str) -> None:
    wanted = {"localsgd": 1, "diloco": 0, "streaming_diloco": 3, "muloco": 2}
    assert two.run(both_ways, name) == [(wanted[name], True)] * 2
