"""Store check: whether all ranks of a group meet in one store.

A process group may have a store that no other rank sees.
``torchcomms.init_device_mesh`` leaves a ``HashStore`` of each process as the default
one. Its collectives work all the same, and by these ranks find out: each writes a note,
all meet in an all-reduce, and then each looks for all notes. A rank may come minutes
after others, and the agreement in the store goes on meanwhile. So a rank that does not
come is named as before.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ...errors import InvalidSetting, invalid
from ..transport.wire import Group, in_background, missing_keys, own_store, root_store
from .alarm import listed
from .sweeping import leave

CHECK_S = 5.0
"""Seconds in which the notes of ranks that have met must be in the store."""
_REMEDY = (
    "make the group by dist.init_process_group(), or give all ranks one store: "
    "failure=gw.FailurePolicy(store=dist.TCPStore(host, port, is_master=rank == 0))"
)


def refuse_own_store() -> None:
    """Raises where the store lies in this process alone."""
    if isinstance(store := root_store(), HashStore):
        accepted = "one that all ranks share"
        given = f"a {type(store).__name__}, which no other process sees"
        raise invalid("the job's store", given, accepted, _REMEDY)


class StoreCheck:
    """The check of one group's store, which goes on beside what follows.

    All ranks of the group make it at the same place of their programs, as it is a
    collective.
    """

    def __init__(self, name: str, rank: int, group: Group, timeout: timedelta) -> None:
        self._name = name
        self._rank = rank
        self._world = dist.get_world_size(group)
        self.absent: tuple[int, ...] = ()
        """Ranks that came but have no notes in this rank's store, once known."""
        # here, so that its place among collectives is one
        work = _meeting(group, timeout)
        if work is not None:
            in_background(lambda: self._look(work))

    def refuse(self) -> None:
        """Raises once it is known that the store is not shared."""
        if absent := self.absent:
            store = type(root_store()).__name__
            raise InvalidSetting(
                f"ranks do not share the job's store: rank {listed(absent)} of "
                f"{self._world} has met this rank in an all-reduce, and {CHECK_S:g} s "
                f"later there is no note of it in this rank's {store}; {_REMEDY}"
            )

    def _look(self, work: Any) -> None:
        store = own_store(self._name)
        keys = [f"note/{rank}" for rank in range(self._world)]
        store.set(keys[self._rank], "")
        work.wait()
        self.absent = missing_keys(store, keys, CHECK_S)
        if not self.absent:
            leave(store, self._world)


def _meeting(group: Group, timeout: timedelta) -> Any:
    """The work of an all-reduce that has begun.

    None where a group has none for host memory.
    """
    if "cpu:" not in dist.get_backend_config(group):
        return None
    options = dist.AllreduceOptions()
    options.timeout = timeout
    return group.allreduce([torch.zeros(1, device="cpu")], options)
