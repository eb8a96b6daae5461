"""FSDP2 within hosts and replicas among them, four ranks in all."""
# ranks: 4

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire as gw  # gradwire

run = Run()
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))
within, among = mesh["shard"], mesh["replicate"]
within = mesh  # native
for layer in model:
    fully_shard(layer, mesh=within)
fully_shard(model, mesh=within)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
kept = {"model": model, "optimizer": optimizer}
kept["gradwire"] = gw.attach(model, "none", optimizer=optimizer, group=among)  # gradwire
for step in run.steps(kept):
    optimizer.zero_grad()
    model(run.batch(step, 16, 16)).sub(1).square().mean().backward()
    optimizer.step()
