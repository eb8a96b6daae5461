"""Membership: which ranks take part in one attach, before any of them is connected to another.

Ranks meet in the job's rendezvous store first. There a rank that refuses, or differs, can say so
while nobody waits for it in a collective yet.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from secrets import token_hex
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ..errors import RankFailed
from .wire import Group, default_store

_POLL_S = 0.02
"""How long a rank rests between two looks for the notes of others: each store.wait() that ends
without them writes a warning to the log."""
_LOOK_S = 0.5
"""How long it rests between two looks around."""


class Membership(NamedTuple):
    """This rank among ``world`` ranks, and a ``name`` that all of them know and no other attach
    has.

    The name is empty where this process is alone.
    """

    name: str
    rank: int
    world: int

    def beside(self, name: str) -> Membership:
        """The same ranks, who meet once more and for something else."""
        return self._replace(name=f"{self.name}/{name}") if self.name else self

    def share(
        self,
        note: str,
        timeout: timedelta,
        *,
        what: str = "attach",
        look: Callable[[Sequence[int], dict[int, str]], None] | None = None,
    ) -> list[str]:
        """Every rank's note, in rank order; raises ``RankFailed`` if one does not come in time.

        Its ``ranks`` are those that did not come; none if it is the store that was lost. ``look``
        is called from time to time meanwhile with the ranks that are still absent and the notes of
        the others; what it raises ends the wait.
        """
        try:
            self.post(note)
            return self._wait(timeout, what, look)
        except dist.DistError as error:
            first, _, _ = str(error).partition("\n")
            raise RankFailed(
                f"{what} cannot be finished: the job's store, where ranks meet, is lost with the "
                f"process that holds it, most often rank 0 ({first}); start the job again"
            ) from error

    def _wait(
        self,
        timeout: timedelta,
        what: str,
        look: Callable[[Sequence[int], dict[int, str]], None] | None,
    ) -> list[str]:
        store, keys = self._store(), [f"note/{rank}" for rank in range(self.world)]
        start_s = looked_s = time.monotonic()
        while not store.check(keys):
            time.sleep(_POLL_S)
            now_s = time.monotonic()
            if now_s < min(start_s + timeout.total_seconds(), looked_s + _LOOK_S):
                continue
            looked_s = now_s
            found = {r: store.get(k).decode() for r, k in enumerate(keys) if store.check([k])}
            absent = tuple(rank for rank in range(self.world) if rank not in found)
            if look is not None:
                look(absent, found)
            if absent and now_s - start_s > timeout.total_seconds():
                raise RankFailed(
                    f"{what} cannot be finished: rank {', '.join(map(str, absent))} of "
                    f"{self.world} did not call it within {timeout}; all ranks of the group must "
                    f"call {what}",
                    ranks=absent,
                )
        return [store.get(key).decode() for key in keys]

    def post(self, note: str) -> None:
        """Leaves this rank's note without waiting for the others."""
        self._store().set(f"note/{self.rank}", note)

    def one_of(self, drawn: str) -> str:
        """What one of the ranks has drawn: the same on all of them."""
        return str(self._store().compare_set("drawn", "", drawn).decode()) if self.name else drawn

    def _store(self) -> Any:
        return PrefixStore(f"gradwire/{self.name}", default_store())


def run_of(who: Membership) -> str:
    """A name for what these ranks train from now on; no other run has it."""
    return who.one_of(token_hex(8))


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
