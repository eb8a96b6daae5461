"""A mesh of hosts of several ranks among four, and models attached in it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gradwire as gw
from gradwire.runtime.handle import Handle
from tests.runtime.training import ONEBIT, SMALL_MB


def mesh(num_hosts: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (num_hosts, 4 // num_hosts), mesh_dim_names=("hosts", "local"))


def attached_to(model: nn.Module, num_hosts: int, **settings: Any) -> Handle:
    return gw.attach(model, ONEBIT, mesh=mesh(num_hosts), bucket_cap_mb=SMALL_MB, **settings)
