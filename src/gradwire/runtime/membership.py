"""Membership: which ranks take part in one attach, before any of them is connected to another.

Ranks meet in the job's rendezvous store first. There a rank that refuses, or differs, can say so
while nobody waits for it in a collective yet.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ..errors import RankFailed
from .wire import Group, default_store


class Membership(NamedTuple):
    """This rank among ``world`` ranks, and a ``name`` that all of them know and no other attach
    has.

    The name is empty where this process is alone.
    """

    name: str
    rank: int
    world: int

    def share(self, note: str, timeout: timedelta) -> list[str]:
        """Every rank's note, in rank order; raises ``RankFailed`` if one does not come in time."""
        self.post(note)
        store, keys = self._store(), [f"note/{rank}" for rank in range(self.world)]
        try:
            store.wait(keys, timeout)
        except RuntimeError as error:
            absent = tuple(r for r, key in enumerate(keys) if not store.check([key]))
            raise RankFailed(
                f"attach cannot be finished: rank {', '.join(map(str, absent))} of {self.world} "
                f"did not call it within {timeout}; all ranks of the group must call attach",
                ranks=absent,
            ) from error
        return [store.get(key).decode() for key in keys]

    def post(self, note: str) -> None:
        """Leaves this rank's note without waiting for the others."""
        self._store().set(f"note/{self.rank}", note)

    def _store(self) -> Any:
        return PrefixStore(f"gradwire/{self.name}", default_store())


ALONE = Membership("", 0, 1)


def join(group: Group | None) -> Membership:
    """This rank's place in ``group`` (None: all ranks, or this process alone).

    To be called once an attach: calls are counted, and ranks that attach alike count alike.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return ALONE
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    _JOINED[ranks] += 1
    name = f"{'-'.join(map(str, ranks))}/{_JOINED[ranks]}"
    return Membership(name, dist.get_rank(group), len(ranks))


_JOINED: Counter[tuple[int, ...]] = Counter()
"""How often each set of ranks was joined."""
