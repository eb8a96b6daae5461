"""Going on: the connections of the ranks that are left, or of a newcomer's ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ...errors import ExitCode, LoopMistake, RankFailed
from ..engine.engine import Engine
from ..liveness.membership import ALONE, Membership
from ..survive.groups import open_group, register_group
from ..transport.wire import Channel, Group

Connect = Callable[..., Engine]
"""Makes an engine of a membership, with keywords of ``Engine``."""


class Successors(NamedTuple):
    """The ranks that go on, as their engine and their process group know them."""

    engine: Engine
    group: Group | None
    channel: Channel | None
    """The channel of their rounds; None for a rank alone."""
    values: list[dict[str, Any]]
    """The value that each of them has announced."""
    since_s: float
    """When this rank noticed the loss or the newcomer, on its clock."""
    is_parted: bool = False
    """Whether this rank is alone as it cannot reach the others."""


def channel_of(engine: Engine) -> Channel | None:
    """Connects the engine's ranks for their rounds."""
    return engine.open_beside("rounds") if engine.world > 1 else None


def go_on_without(
    old: Engine,
    failure: BaseException,
    connect: Connect,
    own: dict[str, Any],
    since_s: float,
) -> Successors:
    """Connects the ranks that ``failure`` leaves, which all call it.

    ``own`` is the value that this rank announces. A rank that is cut off, or that the
    others have left behind, goes on alone. Raises ``failure`` where this rank cannot go
    on: no rank is lost, or this rank is at fault, or the job's store is lost.
    """
    if not isinstance(failure, RankFailed) or isinstance(failure, LoopMistake):
        raise failure
    lost = old.who.in_group(failure.ranks)
    is_out = not failure.ranks or old.rank in lost
    epoch = None if is_out else old.next_epoch(own, lost)
    if epoch is None:
        if not _may_come_back(old, failure):
            raise failure
        old.close()
        who = ALONE._replace(ranks=old.who.in_job([old.rank]))
        return Successors(connect(who), None, None, [own], since_s, is_parted=True)
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
        old = connect(who, num_channels=0)
        return go_on_without(old, later, connect, own, since_s)
    try:
        group = _group_of(engine, who)
        return Successors(engine, group, channel_of(engine), values, since_s)
    except RankFailed as later:
        return go_on_without(engine, later, connect, own, since_s)


def _may_come_back(old: Engine, failure: RankFailed) -> bool:
    """Whether the others may live, and be reached again."""
    if failure.exit_code == ExitCode.RANK_LOST:
        return bool(failure.ranks) and bool(old.signs())
    return bool(failure.ranks) and failure.exit_code == ExitCode.NETWORK


def _group_of(engine: Engine, who: Membership) -> Group:
    """A process group of torch.distributed, which knows these ranks."""
    name = f"{who.name}/group"
    opening = partial(open_group, name, who.rank, who.world, engine.timeout)
    group = engine.meanwhile("connect", opening)
    register_group(group, name, who.ranks)
    return group
