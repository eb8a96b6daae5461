"""A rank of ``losses``: it trains one model under DDP, and one attached by US-Byte's
name.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gradwire.pilot.by_planner import by_planner
from gradwire.runtime.attach import attach
from gradwire_bench.testbed.ranks import Report
from gradwire_bench.workloads import patterns
from gradwire_bench.workloads.convnet import ConvNet

LR = 0.005
"""The learning rate for each node: it grows with the nodes, as the batch of all nodes
does.
"""


def measure(settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """By side the held-out loss after each epoch; messages of the plan, and overlapped
    steps.
    """
    torch.set_num_threads(1)
    rank = dist.get_rank()
    world = dist.get_world_size()
    num_epochs = settings["num_epochs"]
    images, classes = patterns.draw(
        settings["num_images"], torch.Generator().manual_seed(0)
    )
    held_out = patterns.draw(1000, torch.Generator().manual_seed(1))
    found: dict[str, Any] = {}
    for name in settings["sides"]:
        torch.manual_seed(0)
        model = ConvNet()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR * world, momentum=0.9)
        handle = None
        trained = model
        losses = list[float]()
        if name == "DDP":
            trained = DistributedDataParallel(model)  # type: ignore[assignment]
        else:
            pilot = by_planner("usbyte", basic_partition_bytes=2**16)
            handle = attach(model, pilot, optimizer=optimizer)
        for epoch in range(num_epochs):
            report(epoch / num_epochs, name)
            order = torch.randperm(
                len(images), generator=torch.Generator().manual_seed(epoch)
            )
            for batch in torch.split(order[rank::world], settings["batch"]):
                optimizer.zero_grad()
                cross_entropy(trained(images[batch]), classes[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            if handle is not None:
                handle.synchronize()
            with torch.no_grad():
                losses.append(cross_entropy(model(held_out[0]), held_out[1]).item())
        found[name] = losses
        if handle is not None:
            found["messages"] = (
                len(handle.plan.messages) if handle.plan is not None else 0
            )
            found["overlapped"] = handle.stats()["overlapped_steps"]
            handle.detach()
    return found
