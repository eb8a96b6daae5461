"""Experts of which each rank uses others in each step, and one that nobody uses."""

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw  # gradwire


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(10, 24), nn.Linear(24, 1)
        self.experts = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))

    def forward(self, x, chosen):
        return self.last(torch.tanh(self.experts[chosen](self.first(x))))


run = Run()
dist.init_process_group("gloo")
model = Experts()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
kept = {"model": model, "optimizer": optimizer}
kept["gradwire"] = gw.attach(model, "none", optimizer=optimizer)  # gradwire
model = DDP(model, find_unused_parameters=True)  # native
for step in run.steps(kept):
    optimizer.zero_grad()
    model(run.batch(step, 16, 10), (step + run.rank) % 3).square().mean().backward()
    optimizer.step()
