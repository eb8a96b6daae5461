"""Embeddings with row-sparse gradients, by SparseAdam, beside dense layers, by Adam."""

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw  # gradwire


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.EmbeddingBag(500, 16, sparse=True)
        self.users = nn.Embedding(300, 16, sparse=True)
        self.top = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, items, users):
        return self.top(torch.cat([self.items(items), self.users(users)], 1))


run = Run()
dist.init_process_group("gloo")
model = Clicks()
rows = torch.optim.SparseAdam([model.items.weight, model.users.weight], lr=1e-2)
dense = torch.optim.Adam(model.top.parameters(), lr=1e-2)
kept = {"model": model, "rows": rows, "dense": dense}
kept["gradwire"] = gw.attach(model, "none", optimizer=dense)  # gradwire
model = DDP(model)  # native
for step in run.steps(kept):
    rows.zero_grad()
    dense.zero_grad()
    items, users = run.words(step, 8, 5, below=500), run.words(step, 8, below=300)
    model(items, users).square().mean().backward()
    rows.step()
    dense.step()
