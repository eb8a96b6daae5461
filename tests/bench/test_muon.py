"""Muon with AdamW: steps are those of torch's own two optimizers."""

from __future__ import annotations

import torch
from torch import nn

from gradwire_bench.training.trainer import TIMES_RATE, MuonWithAdamW


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
    others = [p for n, p in theirs.named_parameters() if n not in ("last.weight", "kernels.weight")]
    adamw = torch.optim.AdamW(others, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    kernels = nn.Parameter(theirs.kernels.weight.detach().view(4, 3))
    of_kernels = torch.optim.Muon([kernels], lr=TIMES_RATE * 0.01)
    for step in range(3):
        x = torch.arange(10).remainder(8).view(10, 1) + torch.zeros(10, 1, dtype=torch.long)
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
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own, other), name
    assert not torch.equal(ours.last.weight, model().last.weight)
