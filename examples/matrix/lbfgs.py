"""An optimizer whose step runs forward and backward itself, several times."""

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw  # gradwire

run = Run()
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3, tolerance_grad=0)
kept = {"model": model, "optimizer": optimizer}
kept["gradwire"] = gw.attach(model, "none", optimizer=optimizer)  # gradwire
model = DDP(model)  # native
for step in run.steps(kept):
    inputs, targets = run.batch(step, 16, 6), run.batch(step, 16, 2)

    def closure(inputs=inputs, targets=targets):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        dist.all_reduce(shared := loss.detach().clone())
        return shared / run.world

    optimizer.step(closure)
