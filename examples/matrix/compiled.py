"""A compiled model, whose modules run as one graph, and a schedule by the step."""

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw  # gradwire

run = Run()
dist.init_process_group("gloo")
raw = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=run.num_steps)
kept = {"model": raw, "optimizer": optimizer, "scheduler": scheduler}
kept["gradwire"] = gw.attach(raw, "none", optimizer=optimizer)  # gradwire
model = raw
model = DDP(raw)  # native
model = torch.compile(model, backend="aot_eager")
for step in run.steps(kept):
    optimizer.zero_grad()
    model(run.batch(step, 16, 16)).square().mean().backward()
    optimizer.step()
    scheduler.step()
