"""Complex parameters in a filter of frequencies, beside real ones."""

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw  # gradwire


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(17, 17, dtype=torch.complex64) / 4)
        self.shift = nn.Parameter(torch.zeros(17, dtype=torch.complex64))
        self.last = nn.Linear(32, 1)

    def forward(self, x):
        return self.last(torch.fft.irfft(torch.fft.rfft(x) @ self.mix + self.shift))


run = Run()
dist.init_process_group("gloo")
model = Filter()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
kept = {"model": model, "optimizer": optimizer}
kept["gradwire"] = gw.attach(model, "none", optimizer=optimizer)  # gradwire
model = DDP(model)  # native
for step in run.steps(kept):
    optimizer.zero_grad()
    model(run.batch(step, 16, 32)).sub(1).square().mean().backward()
    optimizer.step()
