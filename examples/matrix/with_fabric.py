"""Fabric: a loop of one's own that accumulates under ``no_backward_sync``."""

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from one_run import Run
from torch import nn

from gradwire.integrations.lightning import GradwireFabric  # gradwire

run = Run()
strategy = DDPStrategy()  # native
strategy = GradwireFabric("none")  # gradwire
fabric = Fabric(accelerator="cpu", devices=run.world, strategy=strategy)
fabric.launch()
raw = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
model, optimizer = fabric.setup(raw, torch.optim.AdamW(raw.parameters(), lr=1e-2))
kept = {"model": raw, "optimizer": optimizer}
kept["gradwire"] = strategy.attachment.handle  # gradwire
for step in run.steps(kept):
    for part in range(2):
        inputs = run.batch(2 * step + part, 16, 16)
        with fabric.no_backward_sync(model, enabled=part == 0):
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
