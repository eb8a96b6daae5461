"""A rank program: an attach and a step whose payloads take longer than the time-out."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw
from gradwire_bench.testbed.relay import own_counters


def measure(settings: dict[str, Any], report: object) -> dict[str, Any]:
    begin_s = time.perf_counter()
    torch.manual_seed(dist.get_rank())  # so that rank 0 sends all of its parameters
    model = nn.Linear(settings["numel"] // 512, 512, bias=False)
    handle = gw.attach(
        model,
        "none",
        options=gw.Options(num_channels=1, bucket_cap_mb=1000.0),
        failure=gw.FailurePolicy(
            timeout=timedelta(seconds=settings["timeout_s"]), on_failure="shrink"
        ),
    )
    attached_s = time.perf_counter() - begin_s
    counted = own_counters()
    model(torch.ones(1, model.in_features)).sum().backward()
    step_s = time.perf_counter() - begin_s - attached_s
    found = {
        "attached_s": attached_s,
        "step_s": step_s,
        "sent_bytes": own_counters().since(counted).tx_bytes,
        "left": handle.stats()["left"],
        "world": handle.world_size,
    }
    handle.detach()
    return found
