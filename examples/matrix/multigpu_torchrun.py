"""A toy regression under DDP, in a main() that ends the process group."""

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw  # gradwire


def main():
    run = Run()
    dist.init_process_group("gloo")
    model = nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kept = {"model": model, "optimizer": optimizer}
    model = DDP(model)
    kept["gradwire"] = gw.attach(model, "none", optimizer=optimizer)  # gradwire
    for step in run.steps(kept):
        optimizer.zero_grad()
        F.mse_loss(model(run.batch(step, 32, 20)), run.batch(step, 32, 1)).backward()
        optimizer.step()
    dist.destroy_process_group()
    return model


model = main()
