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
    """A table, kernels, a matrix, experts in one tensor, an output layer, vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 6)
        self.kernels = nn.Conv1d(1, 4, 3)
        self.inner = nn.Linear(16, 3)
        self.experts = nn.Parameter(0.5 * torch.randn(2, 3, 3))
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inner(self.kernels(self.table(x)).flatten(1))
        out: torch.Tensor = self.head(torch.einsum("bi,eij->bj", inner, self.experts))
        return out


def model() -> Small:
    torch.manual_seed(0)
    return Small()


def test_steps_are_those_of_torchs_optimizers() -> None:
    ours, theirs = model(), model()
    optimizer = MuonWithAdamW(ours, 0.01)
    muon = torch.optim.Muon([theirs.inner.weight], lr=TIMES_RATE * 0.01)
    by_muon = ("inner.weight", "kernels.weight", "experts")
    others = [p for n, p in theirs.named_parameters() if n not in by_muon]
    adamw = torch.optim.AdamW(
        others, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    kernels = nn.Parameter(theirs.kernels.weight.detach().view(4, 3))
    experts = [nn.Parameter(one) for one in theirs.experts.detach()]
    of_views = torch.optim.Muon([kernels, *experts], lr=TIMES_RATE * 0.01)
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
            for one in (muon, adamw, of_views):
                one.param_groups[0]["lr"] *= 0.5
        assert theirs.kernels.weight.grad is not None
        kernels.grad = theirs.kernels.weight.grad.view(4, 3)
        assert theirs.experts.grad is not None
        for expert, grad in zip(experts, theirs.experts.grad, strict=True):
            expert.grad = grad
        for one in (optimizer, muon, adamw, of_views):
            one.step()
    for (name, own), other in zip(
        ours.named_parameters(), theirs.parameters(), strict=True
    ):
        assert torch.equal(own, other), name
    assert not torch.equal(ours.inner.weight, model().inner.weight)


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


def names_of(net: nn.Module, **settings: nn.Module) -> list[str]:
    """The parameters that Muon steps, as the optimizer's text says."""
    optimizer = MuonWithAdamW(net, 0.01, **settings)
    names: list[str] = optimizer.param_groups[0]["param_names"]
    assert str(names) in str(optimizer)
    return names


def test_adamw_steps_the_output_layer() -> None:
    net = model()
    assert names_of(net) == ["experts", "kernels.weight", "inner.weight"]
    assert "head.weight" in names_of(net, head=nn.Identity())
    assert "inner.weight" not in names_of(net, head=net.inner)
    tied = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5))
    tied[2].weight = tied[0].weight
    assert names_of(tied) == ["1.weight"]


def test_a_model_may_name_its_output_layer() -> None:
    class Named(nn.Sequential):
        def get_output_embeddings(self) -> nn.Module:
            return self[0]

    assert names_of(Named(nn.Linear(3, 3), nn.Linear(3, 3))) == ["1.weight"]


def test_muon_logs_the_parameters_of_each(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "gradwire"):
        MuonWithAdamW(nn.Linear(3, 2), 0.01)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["Muon steps nothing", "AdamW steps weight, bias"]


def test_a_state_of_another_head_is_refused() -> None:
    saved = MuonWithAdamW(model(), 0.01, head=nn.Identity()).state_dict()
    with pytest.raises(gw.InvalidSetting, match=r"nn\.Identity"):
        MuonWithAdamW(model(), 0.01).load_state_dict(saved)


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
    "lora": (
        partial(AdamW, lr=2e-4),
        "uniform",
        {"lr": 1.0, "momentum": 0.4},
        20,
        {},
    ),
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
    wanted = {
        "localsgd": 1,
        "lora": 1,
        "diloco": 0,
        "streaming_diloco": 3,
        "muloco": 2,
    }
    assert two.run(both_ways, name) == [(wanted[name], True)] * 2
