"""A convolutional net with batch norms: SGD, StepLR, channels last, evaluation between steps."""

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw  # gradwire


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


run = Run()
dist.init_process_group("gloo")
model = nn.Sequential(
    nn.Conv2d(3, 8, 3), Residual(8), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10)
).to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
kept = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
kept["gradwire"] = gw.attach(model, "none", optimizer=optimizer)  # gradwire
model = DDP(model)  # native
for step in run.steps(kept):
    images = run.batch(step, 8, 3, 10, 10).to(memory_format=torch.channels_last)
    loss = F.cross_entropy(model(images), run.words(step, 8, below=10))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 2:
        model.eval()
        with torch.no_grad():
            model(images)
        model.train()
