"""Survivors: the ranks that are left after a failure agree on who they are and what counts.

They meet in the job's store, as the connections among them are broken. The first one that has heard
of all others, or knows that the rest is gone, writes the decision, and all read the same one. A
rank that comes too late finds itself left out.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as Late
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ...errors import RankFailed
from ..step.engine import Engine
from ..step.wire import in_background, store_for
from .pulse import PATIENCE_S, STORE_PATIENCE_S, Stillness

_POLL_S = 0.02
_SPARE = timedelta(seconds=10)
"""The time beyond the engine's time-out in which the store must have answered."""


class Counted(NamedTuple):
    """The steps that a rank has ended for certain, and those that it could count at most."""

    least: int
    most: int


class Survivors(NamedTuple):
    """The ranks that go on, ascending, and the number of steps that count on all of them."""

    ranks: tuple[int, ...]
    num_steps: int


def decided(counted: Mapping[int, Counted]) -> Survivors | None:
    """The decision by what all survivors told, the same whoever makes it; None if there is none.

    A step counts if every survivor has it. No rank has ended one that another lacks, as ranks wait
    for each other's word (`report`), unless memory or the program of one is damaged.

    >>> decided({0: Counted(7, 7), 2: Counted(6, 7)})
    Survivors(ranks=(0, 2), num_steps=7)
    >>> decided({0: Counted(6, 7), 2: Counted(6, 6)}).num_steps
    6
    """
    agreed = min(one.most for one in counted.values())
    if max(one.least for one in counted.values()) > agreed:
        return None
    return Survivors(tuple(sorted(counted)), agreed)


def meet(engine: Engine, failure: RankFailed, counted: Counted) -> Survivors | None:
    """The survivors' decision; None where there is none or it leaves this rank out.

    It waits for ranks that live, for the engine's time-out at most, and for none that ``failure``
    names. The store must answer within ``STORE_PATIENCE_S``: with its host, nobody can decide.
    """
    end_s = time.monotonic() + STORE_PATIENCE_S
    while not engine.signs():
        if engine.store_is_lost or time.monotonic() > end_s:
            return None
    limit = engine.timeout + _SPARE
    meeting = in_background(lambda: _Meeting(engine, failure.ranks).hold(counted))
    try:
        found: Survivors | None = meeting.result(limit.total_seconds())
    except (dist.DistError, Late):
        return None
    return found if found is not None and engine.rank in found.ranks else None


class _Meeting:
    """One rank's part in a meeting, over a connection to the store of its own."""

    def __init__(self, engine: Engine, lost: Sequence[int]) -> None:
        self._engine, self._lost = engine, lost
        self._store: Any = PrefixStore(
            f"gradwire/{engine.who.name}/left", store_for(engine.who.name).clone()
        )
        self._beats = defaultdict[int, Stillness](Stillness)

    def hold(self, counted: Counted) -> Survivors | None:
        engine, store = self._engine, self._store
        store.set(f"note/{engine.rank}", json.dumps(counted))
        start_s, due = time.monotonic(), {*range(engine.world)} - {*self._lost}
        while not store.check(["decided"]):
            absent = [rank for rank in due if not store.check([f"note/{rank}"])]
            late = time.monotonic() - start_s > engine.timeout.total_seconds()
            if late or not absent or all(self._is_gone(absent)):
                told = {rank: self._note(rank) for rank in due if rank not in absent}
                store.compare_set("decided", "", json.dumps(decided(told)))
            time.sleep(_POLL_S)
        found = json.loads(store.get("decided"))
        return None if found is None else Survivors(tuple(found[0]), found[1])

    def _note(self, rank: int) -> Counted:
        return Counted(*json.loads(self._store.get(f"note/{rank}")))

    def _is_gone(self, ranks: Sequence[int]) -> list[bool]:
        """Whether the pulse of each of these ranks has stood still for long enough."""
        signs = self._engine.signs()
        return [
            bool(signs) and self._beats[rank].read(signs[rank].beat) > PATIENCE_S for rank in ranks
        ]
