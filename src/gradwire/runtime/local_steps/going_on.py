"""Going on: the connections of the ranks that are left, or of a newcomer's ranks."""

from typing import Any, NamedTuple

from ...errors import ExitCode, RankFailed
from ..engine.engine import Engine
from ..survive.going_on import Connect, survivors_of
from ..transport.wire import Channel, Group


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
    *,
    trains: bool,
) -> Successors:
    """Connects the ranks that ``failure`` leaves, which all call it.

    ``own`` is the value that this rank announces. A rank that the others have left
    behind goes on alone, and so does one that is cut off while it ``trains``. Raises
    ``failure`` where this rank cannot go on: it is at fault, or the job's store is
    lost, or it waits for ranks that it cannot reach.
    """

    def may_come_back(old: Engine, failure: RankFailed) -> bool:
        # the others may live, and be reached again
        who = old.everyone
        is_cut_off = failure.exit_code == ExitCode.NETWORK
        is_lost = failure.exit_code == ExitCode.RANK_LOST
        # where the others have given it up, its store may be out of reach for a while
        is_given_up = is_lost and who.rank in who.in_group(failure.ranks)
        if not failure.ranks:
            return False
        if trains and (is_cut_off or is_given_up):
            return True
        return is_lost and bool(old.signs())

    left = survivors_of(
        old, failure, connect, own, open_beside=channel_of, may_part=may_come_back
    )
    engine, group, values, channel, is_parted = left
    return Successors(engine, group, channel, values, since_s, is_parted)
