"""Going on: the engine and the process group of the ranks that are left."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ...errors import LoopMistake, RankFailed
from ..engine.engine import Engine
from ..liveness.membership import ALONE, Membership
from ..survive.groups import open_group, register_group
from ..transport.wire import Group

Connect = Callable[..., Engine]
"""Makes an engine of a membership, with keywords of ``Engine``."""


class Successors(NamedTuple):
    """The ranks that go on, as their engine and their process group know them."""

    engine: Engine
    group: Group | None
    values: list[list[int]]
    """The value that each of them has announced."""


def go_on_without(
    old: Engine, failure: BaseException, connect: Connect, own: list[int]
) -> Successors:
    """Connects the ranks that ``failure`` leaves, which all call it.

    ``own`` is the value that this rank announces. Raises ``failure`` where this rank
    cannot go on: it is one of the lost ranks, or no rank is lost, or the job's store
    does not answer.
    """
    if not isinstance(failure, RankFailed) or isinstance(failure, LoopMistake):
        raise failure
    lost = old.who.in_group(failure.ranks)
    is_out = not failure.ranks or old.rank in lost
    epoch = None if is_out else old.next_epoch(own, lost)
    if epoch is None:
        raise failure
    old.close()
    ranks = old.who.in_job(epoch.ranks)
    world = len(ranks)
    name = f"{old.who.name}, {world} go on"
    who = Membership(name, epoch.ranks.index(old.rank), world, ranks)
    values = [epoch.values[rank] for rank in epoch.ranks]
    try:
        engine = connect(who if world > 1 else ALONE._replace(ranks=ranks))
    except RankFailed as later:
        # another rank is lost meanwhile, which the others may notice once connected
        return go_on_without(connect(who, num_channels=0), later, connect, own)
    try:
        return Successors(engine, _group_of(engine, who), values)
    except RankFailed as later:
        return go_on_without(engine, later, connect, own)


def _group_of(engine: Engine, who: Membership) -> Group:
    """A process group of torch.distributed, which knows these ranks."""
    name = f"{who.name}/group"
    opening = partial(open_group, name, who.rank, who.world, engine.timeout)
    group = engine.meanwhile("connect", opening)
    register_group(group, name, who.ranks)
    return group
