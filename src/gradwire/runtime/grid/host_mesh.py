"""Hosts of several ranks: the mesh that ``attach`` is given, or the one that torchrun has made.

Ranks are numbered host after host, as torchrun numbers them. A mesh in another order is refused,
and so is a host of more ranks than another: shares of a message are equal, and each goes to the
ranks of the same place on all hosts.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import InvalidSetting, invalid
from ..failure.membership import Membership, join, join_ranks
from ..step.wire import Group

TORCHRUN = "torchrun"
"""The mesh that the variables of torchrun, or of Slurm, describe: so many ranks on each host."""
_SLURM = "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"
"""Slurm's names for LOCAL_WORLD_SIZE and LOCAL_RANK."""
DIMENSIONS = ("hosts", "local")
_REMEDY = "write init_device_mesh('cpu', (8, 4), mesh_dim_names=('hosts', 'local'))"


def join_mesh(mesh: Any, group: Group | None, timeout: timedelta) -> Membership:
    """This rank's place among the ranks of ``mesh``; ``group`` is that of a DDP model, or None."""
    if mesh == TORCHRUN:
        return join(group, timeout)
    if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names != DIMENSIONS:
        given = mesh if not isinstance(mesh, DeviceMesh) else f"dimensions {mesh.mesh_dim_names}"
        accepted = f"a DeviceMesh of the dimensions {DIMENSIONS}, or {TORCHRUN!r}"
        raise invalid("mesh", given, accepted, _REMEDY)
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise invalid("mesh", ranks, "ranks numbered host after host", _REMEDY)
    if dist.get_rank() not in ranks:
        raise invalid("mesh", ranks, "a mesh this rank is in", "attach on its ranks only")
    if group is not None and sorted(dist.get_process_group_ranks(group)) != ranks:
        raise invalid(
            "mesh", ranks, "the ranks of the DDP model's own group", "give DDP that group"
        )
    return join_ranks(tuple(ranks), timeout)


def ranks_per_host(mesh: Any, who: Membership) -> int:
    """The number of ranks on each host; 1 without a mesh.

    Raises ``InvalidSetting`` where torchrun's variables are not those of equal hosts.
    """
    if mesh is None or who.world == 1:
        return 1
    if isinstance(mesh, DeviceMesh):
        return mesh.size(1)
    names = "LOCAL_WORLD_SIZE", "LOCAL_RANK"
    if names[0] not in os.environ and _SLURM[0] in os.environ:
        names = _SLURM
    size, place = (_variable(name) for name in names)
    remedy = "start as many ranks on every host, or give attach a DeviceMesh"
    if who.world != dist.get_world_size() or size < 1 or who.world % size:
        accepted = f"a divisor of {who.world}, the number of ranks, all of which attach"
        raise invalid(names[0], size, accepted, remedy)
    if place != who.rank % size:
        accepted = f"{who.rank % size} on rank {who.rank} of hosts of {size} ranks, host after host"
        raise invalid(names[1], place, accepted, remedy)
    return size


def _variable(name: str) -> int:
    text = os.environ.get(name, "")
    if name == _SLURM[0]:  # Slurm writes "4(x2)" for two nodes of four tasks
        text = re.sub(r"^(\d+)\(x\d+\)$", r"\1", text)
    if not text.isdecimal():
        raise InvalidSetting(
            f"mesh is {TORCHRUN!r}, and {name} is {text or 'not set'}; start with torchrun, or "
            "with srun and as many tasks on every node, or give attach a DeviceMesh"
        )
    return int(text)
