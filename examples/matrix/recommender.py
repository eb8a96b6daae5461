"""A large table of which few rows are used a step, with dense gradients."""

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw  # gradwire

run = Run()
dist.init_process_group("gloo")
model = nn.Sequential(nn.EmbeddingBag(6000, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
kept = {"model": model, "optimizer": optimizer}
kept["gradwire"] = gw.attach(model, "none", optimizer=optimizer)  # gradwire
model = DDP(model)  # native
for step in run.steps(kept):
    optimizer.zero_grad()
    model(run.words(step, 16, 4, below=6000)).sub(1).square().mean().backward()
    optimizer.step()
