"""Going on: the engine and the process group of the ranks that are left."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from ...errors import ExitCode, LoopMistake, RankFailed
from ..engine.engine import Engine
from ..transport.wire import Group
from .groups import ON_HOST, group_of

Connect = Callable[..., Engine]
"""Makes an engine of a membership, with keywords of ``Engine``."""


class Survivors(NamedTuple):
    """The ranks that go on, as their engine and their process group know them."""

    engine: Engine
    group: Group | None
    values: list[Any]
    """The value that each of them has announced."""
    beside: Any = None
    """The connections that they have opened beside."""
    is_parted: bool = False
    """Whether this rank is alone as it cannot reach the others."""


def survivors_of(
    old: Engine,
    failure: BaseException,
    connect: Connect,
    own: Any,
    group: Group | None = None,
    *,
    open_beside: Callable[[Engine], Any] = lambda engine: None,
    may_part: Callable[[Engine, RankFailed], bool] = lambda old, failure: False,
) -> Survivors:
    """Connects the ranks that ``failure`` leaves, which all call it.

    If only the network has failed between them, these are all. Ranks that are lost
    meanwhile are left out too. A host of several ranks, or a replica, goes on whole or
    not at all.

    Args:
        old: The engine of the ranks so far, which is closed.
        failure: The loss.
        connect: Makes an engine.
        own: The value that this rank announces; it has a JSON form.
        group: The process group of the old ranks, whose back ends the new one has.
            None: back ends for host memory.
        open_beside: Opens what the ranks need beside, once they have connected.
        may_part: Whether this rank goes on alone where it is not among the others.

    Raises:
        RankFailed: This rank cannot go on: it is one of the lost ranks, on their host
            or in their replica. Or the job's store does not answer.
    """
    if not isinstance(failure, RankFailed) or isinstance(failure, LoopMistake):
        raise failure
    backends = ON_HOST if group is None else dist.get_backend_config(group)
    num_before = old.world
    while True:
        values = {}
        if failure.ranks or failure.exit_code == ExitCode.NETWORK:
            values = old.next_epoch(own, old.everyone.in_group(failure.ranks))
        if old.everyone.rank not in values:
            if not may_part(old, failure):
                raise _left_out(failure, old)
            old.close()
            alone = connect(old.everyone.going_on([old.rank]))
            return Survivors(alone, None, [own], is_parted=True)
        old.close()
        # its pulse lives on where it cannot connect
        old = connect(old.everyone.going_on([*values]), connects=False)
        try:
            old.connect()
            if old.world < num_before or group is None:
                group = group_of(old, backends)
            beside = open_beside(old)
            return Survivors(old, group, [*values.values()], beside)
        except RankFailed as later:
            # another rank is lost meanwhile, which the others may notice once connected
            failure = later


def _left_out(failure: RankFailed, old: Engine) -> RankFailed:
    """The error on a rank that does not go on."""
    if old.num_together == 1:
        return failure
    unit = "host" if old.replica.world == 1 else "replica"
    return RankFailed(
        f"{failure}; a {unit} that has lost a rank leaves, and whole ones go on",
        ranks=failure.ranks,
        step=failure.step,
        exit_code=failure.exit_code,
    )
