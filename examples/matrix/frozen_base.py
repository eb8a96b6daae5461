"""Low-rank adapters beside frozen layers, which alone are trained and saved."""

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw  # gradwire


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + 2 * self.up(self.down(x))


class Adapters:
    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return {n: p.detach().clone() for n, p in self.model.named_parameters() if p.requires_grad}

    def load_state_dict(self, state):
        self.model.load_state_dict(state, strict=False)


run = Run()
dist.init_process_group("gloo")
model = nn.Sequential(Adapted(nn.Linear(24, 48)), nn.ReLU(), Adapted(nn.Linear(48, 8)))
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
kept = {"adapters": Adapters(model), "optimizer": optimizer}
kept["gradwire"] = gw.attach(model, "none", optimizer=optimizer)  # gradwire
model = DDP(model)  # native
for step in run.steps(kept):
    optimizer.zero_grad()
    model(run.batch(step, 16, 24)).square().mean().backward()
    optimizer.step()
