"""Going on: the engine and the process group of the ranks that are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from ...errors import LoopMistake, RankFailed
from ..engine.engine import Engine
from ..transport.wire import Group
from .groups import ON_HOST, group_of

Connect = Callable[..., Engine]
"""Makes an engine of a membership, with keywords of ``Engine``."""


class Successors(NamedTuple):
    """The ranks that go on, as their engine and their process group know them."""

    engine: Engine
    group: Group | None
    values: list[Any]
    """The value that each of them has announced."""


def go_on_without(
    old: Engine,
    failure: BaseException,
    connect: Connect,
    own: Any,
    group: Group | None = None,
) -> Successors:
    """Connects the ranks that ``failure`` leaves, which all call it.

    ``own`` is the value that this rank announces. ``group`` is the process group of the
    old ranks, whose back ends the new one has; None: back ends for host memory. Ranks
    that are lost meanwhile are left out too. Raises ``failure`` where this rank cannot
    go on: it is one of the lost ranks or on their host, or no rank is lost, or the
    job's store does not answer.
    """
    if not isinstance(failure, RankFailed) or isinstance(failure, LoopMistake):
        raise failure
    backends = ON_HOST if group is None else dist.get_backend_config(group)
    num_before = old.world
    while True:
        values = {}
        if failure.ranks:
            values = old.next_epoch(own, old.who.in_group(failure.ranks))
        is_out = old.rank not in values
        if is_out and old.ranks_per_host > 1:
            raise RankFailed(
                f"{failure}; a host that has lost a rank leaves, and the others go on",
                ranks=failure.ranks,
                step=failure.step,
                exit_code=failure.exit_code,
            ) from failure
        if is_out:
            raise failure
        old.close()
        who = old.who.going_on([*values])
        # its pulse lives on where it cannot connect
        old = connect(who, connects=False)
        try:
            old.connect()
            if old.world < num_before:
                group = group_of(old, backends)
            return Successors(old, group, [*values.values()])
        except RankFailed as later:
            # another rank is lost meanwhile, which the others may notice once connected
            failure = later
