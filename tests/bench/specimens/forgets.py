"""A wrong specimen: residuals are not in its checkpoints."""

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw  # gradwire

run = Run()
dist.init_process_group("gloo")
model = nn.Linear(8, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
kept = {"model": model, "optimizer": optimizer}
handle = gw.attach(model, "none")  # gradwire
model = DDP(model)  # native
for step in run.steps(kept):
    optimizer.zero_grad()
    model(run.batch(step, 16, 8)).square().mean().backward()
    optimizer.step()
