"""Two sites of two ranks: FSDP2 within a site, 4 bits among sites once in ten steps.

torchrun --nproc-per-node 4 examples/islands.py
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire as gw


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    # rank i of a site averages its shards with rank i of the other site
    handle = gw.local_steps(
        model,
        optimizer,
        gw.compress.uniform(),
        every=10,
        outer=partial(torch.optim.SGD, lr=1.0, momentum=0.4),
        group=mesh["site"],
    )
    torch.manual_seed(dist.get_rank())
    weights = torch.linspace(-1, 1, 64).unsqueeze(1)
    for _ in range(100):
        inputs = torch.randn(32, 64)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs @ weights)
        loss.backward()
        optimizer.step()
    handle.end_period()  # both sites have the same parameters now
    if dist.get_rank() == 0:
        stats = handle.stats()
        print(
            f"loss {loss.item():.3f}, {stats['wire_bytes_per_step']:.0f} bytes "
            "sent to the other site per step"
        )
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
