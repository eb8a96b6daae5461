"""Measure a model, plan its messages for a cluster, and train with the next forward
overlapped. The planner usbyte is in the package gradwire-lab.

torchrun --nproc-per-node 2 examples/plan.py
"""

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw

WEIGHTS = torch.linspace(-1, 1, 64).unsqueeze(1)


def loss_of(model: nn.Module) -> torch.Tensor:
    inputs = torch.randn(32, 64)
    return nn.functional.mse_loss(model(inputs), inputs @ WEIGHTS)


def plan_for(model: nn.Module) -> gw.Plan:
    """The same plan on every rank: rank 0 measures and plans, the others receive it."""
    texts = [""]
    if dist.get_rank() == 0:
        profile = gw.profile(
            model, lambda: loss_of(model).backward(), iterations=5, batch_size=32
        )
        cluster = gw.Cluster(
            num_ranks=dist.get_world_size(), rate_bytes_per_s=1.25e9
        )  # 10 Gbit/s
        texts = [
            gw.plan("usbyte", profile, cluster, basic_partition_bytes=2**14).to_json()
        ]
    dist.broadcast_object_list(texts)
    return gw.Plan.parse(texts[0])


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = gw.attach(model, plan_for(model), optimizer=optimizer)
    for _ in range(300):
        optimizer.zero_grad()
        loss = loss_of(
            model
        )  # each layer waits for its own parameters, and is updated, here
        loss.backward()  # does not wait for the network
        optimizer.step()  # neither does this
    handle.synchronize()  # before parameters are read by hand
    if dist.get_rank() == 0:
        overlapped = handle.stats()["overlapped_steps"]
        print(f"loss {loss.item():.3f}, {overlapped} steps overlapped")
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
