"""Accumulation under ``no_sync``, in bfloat16 throughout."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw  # gradwire

run = Run()
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4)).to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
kept = {"model": model, "optimizer": optimizer}
kept["gradwire"] = gw.attach(model, "none", optimizer=optimizer)  # gradwire
model = DDP(model)  # native
for step in run.steps(kept):
    optimizer.zero_grad()
    for part in range(2):
        with model.no_sync() if part == 0 else nullcontext():
            inputs = run.batch(2 * step + part, 16, 16).to(torch.bfloat16)
            model(inputs).square().mean().backward()
    optimizer.step()
