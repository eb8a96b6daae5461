"""Ten lines of gradwire around an ordinary training loop.

torchrun --nproc-per-node 2 examples/train.py
"""

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
    handle = gw.attach(
        model, gw.compress.topk(density=0.05)
    )  # the only line that is new
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    weights = torch.linspace(-1, 1, 64).unsqueeze(1)
    for _ in range(300):
        inputs = torch.randn(32, 64)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs @ weights)
        loss.backward()
        optimizer.step()
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
