"""A Trainer class: float16 autocast with a GradScaler, clipping, snapshots."""

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw  # gradwire


class Trainer:
    def __init__(self, run, model):
        self.run = run
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        self.kept = {"model": model, "optimizer": self.optimizer, "scaler": self.scaler}
        handle = gw.attach(model, "none", optimizer=self.optimizer, scaler=self.scaler)  # gradwire
        self.kept["gradwire"] = handle  # gradwire
        model = DDP(model)  # native
        self.model = model

    def batch(self, step):
        ids = self.run.words(step, 4, 9, below=31)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.float16):
            logits = self.model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train(self):
        for step in self.run.steps(self.kept):
            self.batch(step)


run = Run()
dist.init_process_group("gloo")
model = nn.Sequential(nn.Embedding(31, 24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 31))
Trainer(run, model).train()
