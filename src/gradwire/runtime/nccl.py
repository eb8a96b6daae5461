"""NCCL: process groups that send from the memory of CUDA devices themselves."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def name_of(device: torch.device) -> str | None:
    """The name of a device that NCCL serves, which no other device has; None where it does not."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def connect(device: torch.device, store: Any, rank: int, world: int, timeout: timedelta) -> Any:
    """The process group of ``world`` ranks, each with a device of its own, who meet in ``store``.

    Works of it are waited for by the stream that is current then, and not by the host.
    """
    # A group and not its back end alone: that has no way to launch sends and receives together.
    backend = torch._C._distributed_c10d.ProcessGroupNCCL
    options: Any = backend.Options()
    options._timeout = timeout
    options.global_ranks_in_group = list(range(world))
    group = dist.ProcessGroup(store, rank, world)
    kind = dist.ProcessGroup.BackendType.NCCL
    group._register_backend(device, kind, backend(store, rank, world, options))
    group._set_default_backend(kind)
    return group
