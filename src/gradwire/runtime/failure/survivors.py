"""Survivors: the ranks that are left after a failure agree on who they are and what counts.

They meet in the job's store, as the connections among them are broken. The first one that has heard
of all others, or knows that the rest is gone, writes whose word counts, and all decide by that. A
rank that comes too late finds itself left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import RankFailed
from ..step.engine import Engine
from .pulse import PATIENCE_S, STORE_PATIENCE_S


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

    def are_gone(absent: Sequence[int], found: object) -> bool:
        signs = engine.signs()
        return bool(signs) and all(signs[rank].still_s > PATIENCE_S for rank in absent)

    def decide(found: Mapping[int, Any]) -> Survivors | None:
        return decided({rank: Counted(*told) for rank, told in found.items()})

    who, due = engine.who.beside("left"), {*range(engine.world)} - {*failure.ranks}
    try:
        verdict = who.agree(
            counted, decide, engine.timeout, due=due, look=are_gone, is_partial=True
        )
    except RankFailed:  # the store is lost
        return None
    return verdict if verdict is not None and engine.rank in verdict.ranks else None
