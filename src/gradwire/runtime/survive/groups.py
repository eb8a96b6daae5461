"""Groups: a process group of torch's for ranks that go on after others left or came.

``dist.new_group`` does not serve. It names a group by the number of groups that this
process knows, so ranks in different numbers of groups would wait for each other for
ever. It takes ranks of the default group alone. Under torchcomms it refuses a call that
not all ranks of the job make. Here the ranks name the group by what they have agreed on
in the store. The group then stands in torch's tables, so ``dist.get_rank(group)``,
``DeviceMesh`` and others know its ranks.

torch has no public way into its tables. Where one of them is missing, the group still
carries collectives, and a warning says that torch does not know its ranks.
"""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from ...errors import log
from ..device.devices import kind_of
from ..engine.engine import Engine
from ..transport.wire import Group, default_store, group_store

ON_HOST = "cpu:gloo"
"""The back ends of a group for host memory."""
_TABLES = (
    "pg_map",
    "pg_names",
    "pg_backend_config",
    "pg_group_ranks",
    "tags_to_pg",
    "pg_to_tag",
)
_TYPES = dist.ProcessGroup.BackendType


def open_group(
    name: str, rank: int, world: int, timeout: timedelta, backends: str = ON_HOST
) -> Group:
    """Connects a process group, which torch does not know before ``register_group``.

    Args:
        name: A name that its ranks have agreed on and that is used once.
        rank: This rank's place in the group.
        world: The number of ranks.
        timeout: The longest wait for another rank.
        backends: The back end of each kind of device, as ``dist.get_backend_config``
            writes them. NCCL stays NCCL, and all others become gloo.
    """
    store = group_store(name, timeout)
    group = dist.ProcessGroup(store, rank, world)
    default = _TYPES.GLOO
    gloo: Any = None
    for device, kind in _kinds(backends).items():
        if kind == "nccl":
            default = _TYPES.NCCL
            own_store = PrefixStore(device.type, store)
            accelerator = kind_of(device)
            assert accelerator is not None, "NCCL serves no host memory"
            nccl = accelerator.backend(own_store, rank, world, timeout)
            group._register_backend(device, default, nccl)
        else:
            gloo = gloo or ProcessGroupGloo(store, rank, world, timeout)
            group._register_backend(device, _TYPES.GLOO, gloo)
    group._set_default_backend(default)
    return group


def group_of(engine: Engine, backends: str = ON_HOST) -> Group:
    """A process group of the ranks of ``engine``, which torch knows from now on."""
    who = engine.who
    name = f"{who.name}/group"
    opening = partial(open_group, name, who.rank, who.world, engine.timeout, backends)
    group: Group = engine.meanwhile("connect", opening)
    register_group(group, name, who.numbers, backends)
    return group


def _kinds(backends: str) -> dict[torch.device, str]:
    """The back end of each kind of device; gloo for all that is not NCCL's."""
    pairs = [pair.split(":") for pair in backends.split(",") if ":" in pair]
    return {
        torch.device(device): "nccl" if kind == "nccl" else "gloo"
        for device, kind in pairs
    }


def register_group(
    group: Group, name: str, ranks: Sequence[int], backends: str = ON_HOST
) -> None:
    """Tells torch of a group opened as ``name``, and of its ranks' job numbers."""
    kinds = _kinds(backends)
    config = ",".join(f"{device.type}:{kind}" for device, kind in kinds.items())
    names = {*kinds.values()}
    backend = names.pop() if len(names) == 1 else config
    _enter(group, f"gradwire/{name}", ranks, backend, config)


def stand_outside(rank: int) -> None:
    """Gives a process of no group the number ``rank`` in the job.

    Its default group has this number, so ``dist.get_rank()`` returns it, and no
    connection: a collective without ``group=`` raises.
    """
    store = default_store()
    group = dist.ProcessGroup(store, rank, rank + 1)
    _enter(group, "gradwire/newcomer", range(rank + 1), "undefined", "")
    dist.distributed_c10d._update_default_pg(group)


def _enter(
    group: Group, name: str, ranks: Sequence[int], backend: str, config: str
) -> None:
    """Writes a group into torch's tables, as ``dist.new_group`` does."""
    c10d: Any = dist.distributed_c10d
    world = vars(c10d).get("_world")
    missing = [name for name in _TABLES if not hasattr(world, name)]
    if missing:
        log.warning(
            "torch %s does not know the ranks of handle.group: it lacks %s; "
            "collectives work, and dist.get_rank(group) does not",
            torch.__version__,
            missing[0],
        )
        return
    group._set_group_name(name)
    group._set_group_desc(name)
    tag = f"ptd:{name}"
    world.pg_map[group] = (backend, PrefixStore(name, default_store()))
    world.pg_names[group] = name
    world.pg_backend_config[group] = config
    world.pg_group_ranks[group] = {number: place for place, number in enumerate(ranks)}
    world.pg_to_tag[group] = tag
    for key in ("", tag):
        world.tags_to_pg.setdefault(key, []).append(group)
    c10d._register_process_group(name, group)
