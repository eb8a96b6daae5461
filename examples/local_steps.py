"""MuLoCo in one call: ranks train by themselves by Muon, and exchange 4 bits every five
steps.

torchrun --nproc-per-node 2 examples/local_steps.py
"""

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer, handle = gw.recipes.muloco(
        model, lr=1e-2
    )  # also diloco, streaming_diloco, localsgd
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=200)
    weights = torch.linspace(-1, 1, 64).unsqueeze(1)
    for _ in range(200):
        inputs = torch.randn(32, 64)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs @ weights)
        loss.backward()
        optimizer.step()
        scheduler.step()
    handle.end_period()  # all ranks have the same parameters now
    if dist.get_rank() == 0:
        stats = handle.stats()
        print(
            f"loss {loss.item():.3f}, {stats['wire_bytes_per_step']:.0f} bytes "
            "sent a step"
        )
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
