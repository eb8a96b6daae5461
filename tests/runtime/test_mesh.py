"""A mesh of ranks: gradients are averaged along its data-parallel dimension, and no other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.errors import InvalidSetting
from tests.runtime.meshes import device_mesh
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.multi


def in_a_mesh(rank: int, world: int) -> tuple[int, list[float]]:
    """Each rank of a column of the mesh holds the same shard; the columns' shards differ."""
    mesh = device_mesh((2, 2), ("dp", "tp"))
    shard = nn.Linear(3, 2, bias=False)
    nn.init.constant_(shard.weight, float(rank))
    with pytest.raises(InvalidSetting, match=r"write group=mesh\['dp'\]"):
        gw.attach(shard, gw.compress.none(), group=mesh)
    handle = gw.attach(shard, gw.compress.none(), group=mesh["dp"])
    assert float(shard.weight[0, 0]) == rank % 2, "the column's first rank gives its shard"
    (shard(torch.full((1, 3), rank + 1.0)).sum()).backward()
    assert shard.weight.grad is not None
    found = handle.world_size, shard.weight.grad[0].tolist()
    handle.detach()
    return found


def test_a_mesh_of_two_by_two(four: Ranks) -> None:
    means = [2.0, 3.0, 2.0, 3.0]  # of ranks 0 and 2, and of ranks 1 and 3
    assert four.run(in_a_mesh) == [(2, [mean] * 3) for mean in means]
