"""Training by FSDP2, two hosts of two shards, gradients in 4 bits among hosts; --resume
goes on.

torchrun --nproc-per-node 4 examples/with_fsdp.py --folder /tmp/run --steps 20
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire as gw

options = argparse.ArgumentParser()
options.add_argument("--folder", required=True, help="where ranks write checkpoints")
options.add_argument("--steps", type=int, default=20)
options.add_argument("--resume", action="store_true")
chosen = options.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
for block in model:
    fully_shard(block, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])
handle = gw.attach(model, gw.compress.uniform(bitwidth=4), group=mesh["replicate"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def states() -> dict[str, Any]:
    """The state of all, each rank's shards of it, to be saved or to be loaded into."""
    own, moments = get_state_dict(model, optimizer)
    return {"model": own, "optimizer": moments, "gradwire": handle.sharded_state()}


if chosen.resume:
    saved = states()
    dcp.load(saved, checkpoint_id=max(Path(chosen.folder).glob("step_*")))
    moments = saved["optimizer"]
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=moments
    )
    handle.load_state_dict(saved["gradwire"])

for step in range(handle.step, handle.step + chosen.steps):
    draws = torch.Generator().manual_seed(4 * step + rank)
    inputs = torch.randn(32, 16, generator=draws)
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dcp.save(states(), checkpoint_id=Path(chosen.folder) / f"step_{handle.step:06}")
values = [float(p.detach().full_tensor().double().sum()) for p in model.parameters()]
if rank == 0:
    print(
        f"step {handle.step}: {handle.stats()['wire_bytes_per_step']:.0f} bytes a step"
    )
    print("parameters", *(value.hex() for value in values))
dist.destroy_process_group()
