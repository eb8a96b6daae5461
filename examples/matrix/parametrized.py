"""Weights that are functions of what is trained: a weight norm, an orthogonal one; lazy layers."""

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parametrizations

import gradwire as gw  # gradwire

run = Run()
dist.init_process_group("gloo")
model = nn.Sequential(nn.LazyLinear(24), nn.ReLU(), nn.LazyLinear(24), nn.ReLU(), nn.Linear(24, 1))
model(torch.zeros(2, 12))
parametrizations.weight_norm(model[2])
parametrizations.orthogonal(model[4])
optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2)
kept = {"model": model, "optimizer": optimizer}
kept["gradwire"] = gw.attach(model, "none", optimizer=optimizer)  # gradwire
model = DDP(model)  # native
for step in run.steps(kept):
    optimizer.zero_grad()
    model(run.batch(step, 16, 12)).sub(1).square().mean().backward()
    optimizer.step()
