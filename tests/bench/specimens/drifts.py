"""A wrong specimen: only a part of what is trained is attached, so the rest drifts
apart.
"""

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw  # gradwire

run = Run()
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
kept = {"model": model, "optimizer": optimizer}
kept["gradwire"] = gw.attach(model[0], "none")  # gradwire
model = DDP(model)  # native
for step in run.steps(kept):
    optimizer.zero_grad()
    model(run.batch(step, 16, 8)).square().mean().backward()
    optimizer.step()
