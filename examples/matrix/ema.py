"""An average of the weights beside the model, taken after every step."""

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gradwire as gw  # gradwire

run = Run()
dist.init_process_group("gloo")
trained = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
average = AveragedModel(trained, multi_avg_fn=get_ema_multi_avg_fn(0.9))
model = nn.ModuleDict({"trained": trained, "average": average})
optimizer = torch.optim.RMSprop(trained.parameters(), lr=1e-3)
kept = {"model": model, "optimizer": optimizer}
kept["gradwire"] = gw.attach(trained, "none", optimizer=optimizer)  # gradwire
wrapped = trained
wrapped = DDP(trained)  # native
for step in run.steps(kept):
    optimizer.zero_grad()
    wrapped(run.batch(step, 16, 12)).square().mean().backward()
    optimizer.step()
    average.update_parameters(trained)
