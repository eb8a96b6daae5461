"""Two backward passes a step through one graph, whose gradients add up; clipped by value."""

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw  # gradwire

run = Run()
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 2))
optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2)
kept = {"model": model, "optimizer": optimizer}
kept["gradwire"] = gw.attach(model, "none", optimizer=optimizer)  # gradwire
model = DDP(model)  # native
for step in run.steps(kept):
    optimizer.zero_grad()
    outputs = model(run.batch(step, 16, 10))
    outputs[:, 0].square().mean().backward(retain_graph=True)
    (model(run.batch(step + 100, 16, 10))[:, 1] - 1).abs().mean().backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
    optimizer.step()
