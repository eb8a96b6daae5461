"""Membership: which ranks take part in one attach, before any of them is connected to another.

Ranks meet in the job's rendezvous store first. There a rank that refuses, or differs, can say so
while nobody waits for it in a collective yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ..errors import RankFailed
from .wire import Group, default_store, in_background


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
        notes: list[str] = self._ask(lambda store: self._shared(store, note, timeout), timeout)
        return notes

    def post(self, note: str) -> None:
        """Leaves this rank's note without waiting for the others."""
        self._ask(lambda store: store.set(f"note/{self.rank}", note), timedelta(0))

    def _shared(self, store: Any, note: str, timeout: timedelta) -> list[str]:
        store.set(f"note/{self.rank}", note)
        keys = [f"note/{rank}" for rank in range(self.world)]
        try:
            store.wait(keys, timeout)
        except RuntimeError as error:
            absent = tuple(r for r, key in enumerate(keys) if not store.check([key]))
            if absent:
                raise RankFailed(
                    f"attach cannot be finished: rank {', '.join(map(str, absent))} of "
                    f"{self.world} did not call it within {timeout}; all ranks of the group must "
                    "call attach",
                    ranks=absent,
                ) from error
        return [store.get(key).decode() for key in keys]

    def _ask(self, question: Callable[[Any], Any], timeout: timedelta) -> Any:
        """What the store answers, asked over a connection that nobody else waits for."""
        name = f"gradwire/{self.name}"
        asked = in_background(lambda: question(PrefixStore(name, default_store().clone())))
        try:
            return asked.result((timeout + STORE_PATIENCE).total_seconds())
        except RankFailed:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise RankFailed(
                "attach cannot be finished: the job's rendezvous store did not answer within "
                f"{timeout + STORE_PATIENCE}, so its host is lost or stopped: rank 0 of the job "
                "(or the agent of torchrun that started it)",
                ranks=(0,) if self.name.split("-")[0] == "0" else (),
            ) from error


STORE_PATIENCE = timedelta(seconds=10)
"""How much later than asked for a store may answer, before its host counts as lost."""


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
