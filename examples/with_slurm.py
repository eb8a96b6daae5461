"""Training under Slurm, or under srun's variables alone; gradients in 4 bits.

sbatch examples/with_slurm.sbatch, or on one machine without Slurm, as two tasks of one
node. The second task is the same with 1 in place of both 0:

MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 SLURM_NTASKS=2 SLURM_PROCID=0 SLURM_LOCALID=0 \
    python examples/with_slurm.py --folder /tmp/run &
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw

options = argparse.ArgumentParser()
options.add_argument(
    "--folder", required=True, help="on a file system that all nodes share"
)
options.add_argument("--steps", type=int, default=20)
chosen = options.parse_args()

# srun starts a process a task and numbers them; the batch script has chosen where they
# meet.
rank = int(os.environ["SLURM_PROCID"])
world = int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
handle = gw.attach(model, gw.compress.uniform(bitwidth=4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

# A job that is requeued, after a time limit or a lost node, goes on from its
# checkpoint.
path = Path(chosen.folder) / "checkpoint.pt"
if path.exists():
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    handle.load_state_dict(saved["gradwire"])  # takes this rank's part

for step in range(handle.step, handle.step + chosen.steps):
    draws = torch.Generator().manual_seed(world * step + rank)
    inputs = torch.randn(32, 16, generator=draws)
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

everything = handle.gather_state()  # on every rank; rank 0 gets all
if rank == 0:
    path.parent.mkdir(parents=True, exist_ok=True)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**states, "gradwire": everything}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
    print(
        f"step {handle.step}: {handle.stats()['wire_bytes_per_step']:.0f} bytes a step"
    )
    print(
        "parameters",
        *(float(p.detach().double().sum()).hex() for p in model.parameters()),
    )
dist.destroy_process_group()
