"""Layers whose activations are computed again in the backward pass, with dropout in them."""

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import gradwire as gw  # gradwire


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        made = (nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
        self.blocks, self.last = nn.ModuleList(made), nn.Linear(16, 1)

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.last(x)


run = Run()
dist.init_process_group("gloo")
model = Deep()
optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
kept = {"model": model, "optimizer": optimizer}
kept["gradwire"] = gw.attach(model, "none", optimizer=optimizer)  # gradwire
model = DDP(model)  # native
for step in run.steps(kept):
    optimizer.zero_grad()
    model(run.batch(step, 16, 16)).square().mean().backward()
    optimizer.step()
