"""Training by Accelerate, its gradients as 8-bit numbers; --resume goes on from the
checkpoint.

torchrun --nproc-per-node 2 examples/with_accelerate.py --folder /tmp/run --steps 20
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn

import gradwire as gw
from gradwire.integrations.accelerate import prepare

options = argparse.ArgumentParser()
options.add_argument("--folder", required=True, help="where the checkpoint is written")
options.add_argument("--steps", type=int, default=20)
options.add_argument("--resume", action="store_true")
chosen = options.parse_args()

accelerator = Accelerator(cpu=True)
gradwire = prepare(accelerator, gw.compress.int8())

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = accelerator.prepare(model, optimizer)
if chosen.resume:
    accelerator.load_state(chosen.folder)

for step in range(gradwire.handle.step, gradwire.handle.step + chosen.steps):
    draws = torch.Generator().manual_seed(2 * step + accelerator.process_index)
    inputs = torch.randn(32, 16, generator=draws)
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()

accelerator.save_state(chosen.folder)
stats = gradwire.handle.stats()
bits = [float(p.detach().double().sum()).hex() for p in model.parameters()]
accelerator.print(
    f"step {gradwire.handle.step}: {stats['wire_bytes_per_step']:.0f} bytes a step"
)
accelerator.print("parameters", *bits)
accelerator.end_training()
