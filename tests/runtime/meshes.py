"""Meshes that all tests of a pool share, and models attached in one of hosts of several
ranks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

import gradwire as gw
from gradwire.runtime.handle import Handle
from tests.runtime.given import keywords
from tests.runtime.training import ONEBIT, SMALL_MB

HAS_REDUCE_SCATTER = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
needs_reduce_scatter = pytest.mark.skipif(
    not HAS_REDUCE_SCATTER, reason="gw.fsdp.reduce_scatter needs torch 2.13"
)


@cache
def device_mesh(
    shape: tuple[int, ...], names: tuple[str, ...] | None = None
) -> DeviceMesh:
    """The mesh of these dimensions in this process, made once.

    Each group of a mesh has a thread that wakes a hundred times a second, until its
    process ends.
    """
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def mesh(num_hosts: int = 2) -> DeviceMesh:
    return device_mesh((num_hosts, 4 // num_hosts), ("hosts", "local"))


def attached_to(model: nn.Module, num_hosts: int, **settings: Any) -> Handle:
    return gw.attach(
        model,
        ONEBIT,
        mesh=mesh(num_hosts),
        **keywords(bucket_cap_mb=SMALL_MB, **settings),
    )
