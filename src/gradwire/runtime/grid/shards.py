"""Shards: attach where a tensor-parallel group cuts each layer.

A gradient is averaged among the ranks that hold the same part of it: ``group``. These
may agree with the ranks that hold the other parts, ``shards``, on which elements to
send. Every rank is in one group of each kind, and no other rank is in the same two.
Messages must correspond for that: the first messages of all shards hold parts of the
same layers, and so on. They need not be equally long, as a vocabulary may not divide
evenly.

**Hosts of several ranks** stand in the mesh that ``attach`` is given, or that torchrun
has made. Ranks are numbered host after host, as torchrun numbers them. A mesh in
another order is refused, and so is a host of more ranks than another: shares of a
message are equal, and each goes to the ranks of the same place on all hosts.
"""

import os
import re
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ...errors import InvalidSetting, invalid
from ..liveness.membership import ALONE, Membership, join, join_ranks
from ..transport.wire import Group
from .dtensors import places


def one_dimension(setting: str, value: Any, kind: str, place: int) -> Any:
    """The given process group, by itself or as a mesh, which must have one dimension.

    ``kind`` names the purpose of the dimension, and ``place`` is its usual index in a
    mesh; errors use both. To a rank outside of a group ``new_group`` returns a number
    in the group's place.
    """
    if value is None or isinstance(value, dist.ProcessGroup):
        return value
    if isinstance(value, int) and value == dist.GroupMember.NON_GROUP_MEMBER:
        raise outside_of(setting)
    if not isinstance(value, DeviceMesh):
        raise invalid(
            setting,
            value,
            "a process group this rank is in, or one dimension of a mesh",
            "attach on its ranks only, or leave it out",
        )
    if value.ndim != 1:
        shown = f"a mesh of {value.ndim} dimensions"
        names = value.mesh_dim_names
        remedy = (
            f"write {setting}=mesh[{names[place]!r}]"
            if names
            else "name the dimensions"
        )
        raise invalid(setting, shown, f"one dimension of it: the {kind} one", remedy)
    if value.get_coordinate() is None:
        raise outside_of(setting)
    return value.get_group()


def outside_of(setting: str) -> InvalidSetting:
    """The error on a rank that is not in the group that it gives for ``setting``."""
    return InvalidSetting(
        f"this rank ({dist.get_rank()}) is not in the group that it gave as "
        f"{setting}=; make the call on the ranks of that group only, or give each rank "
        "the group that it is in"
    )


def join_shards(
    shards: Group | DeviceMesh | None, group: Group | None, timeout: timedelta
) -> Membership:
    """This rank's place among the ranks that hold the parts of its layers.

    It is ``ALONE`` if layers are not cut.
    """
    mesh = one_dimension("shards", shards, "tensor-parallel", -1)
    if mesh is None:
        return ALONE
    if dist.get_rank(mesh) < 0:
        raise outside_of("shards")
    averaging = set(dist.get_process_group_ranks(group or dist.group.WORLD))
    both = averaging.intersection(dist.get_process_group_ranks(mesh))
    if len(both) > 1:
        raise invalid(
            "shards",
            f"a group that shares the ranks {sorted(both)} with group=",
            "one that shares this rank alone: others hold the same part of a "
            "layer, or another",
            "write group=mesh['dp'], shards=mesh['tp']",
        )
    return join(mesh, timeout)


def averages_in_host(model: nn.Module, mesh: Any) -> bool:
    """Whether a DDP model averages among the ranks of one host of ``mesh`` alone."""
    if not isinstance(model, DistributedDataParallel):
        return False
    ranks = sorted(dist.get_process_group_ranks(model.process_group))
    return isinstance(mesh, DeviceMesh) and ranks in mesh.mesh.tolist()


def place_in(shards: Membership, model: nn.Module) -> str:
    """The part of every layer that a rank holds, in words.

    The same on all ranks that average.
    """
    placed = [] if shards.world > 1 else places(model)
    return " and ".join(
        f"part {r} of {w}" for r, w in placed or [(shards.rank, shards.world)]
    )


TORCHRUN = "torchrun"
"""The mesh that torchrun's or Slurm's variables describe: hosts by ranks on each."""
_SLURM = "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"
"""Slurm's names for LOCAL_WORLD_SIZE and LOCAL_RANK."""
DIMENSIONS = ("hosts", "local")
_REMEDY = "write init_device_mesh('cpu', (8, 4), mesh_dim_names=('hosts', 'local'))"


def join_mesh(mesh: Any, group: Group | None, timeout: timedelta) -> Membership:
    """This rank's place among the ranks of ``mesh``.

    ``group`` is that of a DDP model, or None.
    """
    if mesh == TORCHRUN:
        return join(group, timeout)
    if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names != DIMENSIONS:
        given = mesh
        if isinstance(mesh, DeviceMesh):
            given = f"dimensions {mesh.mesh_dim_names}"
        raise invalid(
            "mesh",
            given,
            f"a DeviceMesh of the dimensions {DIMENSIONS}, or {TORCHRUN!r}",
            _REMEDY,
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise invalid("mesh", ranks, "ranks numbered host after host", _REMEDY)
    if dist.get_rank() not in ranks:
        raise invalid(
            "mesh", ranks, "a mesh this rank is in", "attach on its ranks only"
        )
    if group is not None and sorted(dist.get_process_group_ranks(group)) != ranks:
        raise invalid(
            "mesh",
            ranks,
            "the ranks of the DDP model's own group",
            "give DDP that group",
        )
    return join_ranks(tuple(ranks), timeout)


def ranks_of_each_host(mesh: Any, who: Membership) -> int:
    """The number of ranks on each host; 1 without a mesh.

    Raises ``InvalidSetting`` where torchrun's variables tell of unequal hosts.
    """
    if mesh is None or who.world == 1:
        return 1
    if isinstance(mesh, DeviceMesh):
        return mesh.size(1)
    names = "LOCAL_WORLD_SIZE", "LOCAL_RANK"
    if names[0] not in os.environ and _SLURM[0] in os.environ:
        names = _SLURM
    size = _variable(names[0])
    place = _variable(names[1])
    remedy = "start as many ranks on every host, or give attach a DeviceMesh"
    if who.world != dist.get_world_size() or size < 1 or who.world % size:
        raise invalid(
            names[0],
            size,
            f"a divisor of {who.world}, the number of ranks, all of which attach",
            remedy,
        )
    if place != who.rank % size:
        raise invalid(
            names[1],
            place,
            f"{who.rank % size} on rank {who.rank} of hosts of {size} ranks, host "
            "after host",
            remedy,
        )
    return size


def _variable(name: str) -> int:
    text = os.environ.get(name, "")
    if name == _SLURM[0]:  # Slurm writes "4(x2)" for two nodes of four tasks
        text = re.sub(r"^(\d+)\(x\d+\)$", r"\1", text)
    if not text.isdecimal():
        raise InvalidSetting(
            f"mesh is {TORCHRUN!r}, and {name} is {text or 'not set'}; start with "
            "torchrun, or with srun and as many tasks on every node, or give attach a "
            "DeviceMesh"
        )
    return int(text)
