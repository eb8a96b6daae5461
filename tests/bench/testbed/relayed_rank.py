"""A rank program: an all-reduce, an exchange of gradwire's, and what the relay has
counted.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw
from gradwire_bench.testbed.relay import own_counters


def measure(settings: dict[str, Any], report: object) -> dict[str, Any]:
    sent_N = torch.ones(settings["numel"])
    dist.all_reduce(sent_N)  # opens what it takes
    turns = []
    for _ in range(3):
        dist.barrier()
        before, start_s = own_counters(), time.perf_counter()
        dist.all_reduce(sent_N)
        seconds = time.perf_counter() - start_s
        dist.barrier()
        turns.append((seconds, own_counters().since(before).tx_bytes))
    model = nn.Linear(512, 512)
    handle = gw.attach(model, "uniform")
    dist.barrier()  # the last of rank 0's first values are on their way
    before = own_counters()
    for _ in range(4):
        model(torch.ones(1, 512)).sum().backward()
    counted = own_counters().since(before).tx_bytes
    stated = handle.stats()["wire_bytes_per_step"] * 4
    handle.detach()
    return {"turns": turns, "counted": counted, "stated": stated}
