"""Two networks with an optimizer each, which train in turn; one trains through the other."""

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw  # gradwire

run = Run()
dist.init_process_group("gloo")
maker = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
judge = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
model = nn.ModuleList([maker, judge])
steps_of = [torch.optim.Adam(one.parameters(), lr=2e-3, betas=(0.5, 0.999)) for one in model]
kept = {"model": model, "maker's": steps_of[0], "judge's": steps_of[1]}
pairs = zip(model, steps_of, strict=True)
maker, judge = DDP(maker), DDP(judge)  # native
handles = [gw.attach(one, "none", optimizer=steps) for one, steps in pairs]  # gradwire
kept |= {f"gradwire {place}": handle for place, handle in enumerate(handles)}  # gradwire
for step in run.steps(kept):
    real, made = run.batch(step, 8, 16) + 1, maker(run.batch(step, 8, 8))
    marks = torch.cat([torch.ones(8, 1), torch.zeros(8, 1)])
    judge.zero_grad()
    judged = judge(torch.cat([real, made.detach()]))
    F.binary_cross_entropy_with_logits(judged, marks).backward()
    steps_of[1].step()
    maker.zero_grad()
    F.binary_cross_entropy_with_logits(judge(made), torch.ones(8, 1)).backward()
    steps_of[0].step()
