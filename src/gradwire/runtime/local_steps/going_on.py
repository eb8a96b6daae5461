"""Going on: the engine and the process group of the ranks that are left."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ...errors import LoopMistake, RankFailed
from ..engine.engine import Engine
from ..liveness.membership import ALONE, Membership
from ..survive.groups import open_group, register_group
from ..survive.shrink import Counted, meet
from ..transport.wire import Group

Connect = Callable[..., Engine]
"""Makes an engine of a membership, with keywords of ``Engine``."""


class Survivors(NamedTuple):
    """The ranks that go on, as their engine and their process group know them."""

    engine: Engine
    group: Group | None


def go_on_without(old: Engine, failure: BaseException, connect: Connect) -> Survivors:
    """Connects the ranks that ``failure`` leaves, which all call it.

    Raises ``failure`` where this rank cannot go on: it is one of the lost ranks, or no
    rank is lost, or the job's store does not answer.
    """
    if not isinstance(failure, RankFailed) or isinstance(failure, LoopMistake):
        raise failure
    own = old.who.in_job([old.rank])
    is_out = not failure.ranks or not {*failure.ranks}.isdisjoint(own)
    decision = None if is_out else meet(old, failure, Counted(0, 0))
    if decision is None:
        raise failure
    old.close()
    ranks = old.who.in_job(decision.ranks)
    world = len(ranks)
    name = f"{old.who.name}, {world} go on"
    who = Membership(name, decision.ranks.index(old.rank), world, ranks)
    try:
        engine = connect(who if world > 1 else ALONE._replace(ranks=ranks))
    except RankFailed as later:
        # another rank is lost meanwhile, which the others may notice once connected
        return go_on_without(connect(who, num_channels=0), later, connect)
    try:
        return Survivors(engine, _group_of(engine, who))
    except RankFailed as later:
        return go_on_without(engine, later, connect)


def _group_of(engine: Engine, who: Membership) -> Group:
    """A process group of torch.distributed, which knows these ranks."""
    name = f"{who.name}/group"
    opening = partial(open_group, name, who.rank, who.world, engine.timeout)
    group = engine.meanwhile("connect", opening)
    register_group(group, name, who.ranks)
    return group
