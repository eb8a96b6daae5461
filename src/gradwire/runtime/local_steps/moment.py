"""LoopMoment: where a rank's loop is when it exchanges; ranks announce it.

Ranks exchange in the same order, so messages meet which were not meant for each other
if one rank ends a period by hand and another does not, or if only one has loaded
weights. All ranks see all moments, and so refuse alike.

An **island** is the ranks of a site that hold one model together. Ranks announce first
among sites, then within their island. So each rank sees the moments of all ranks of all
islands.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...contract.verbs import Among, Steps
from ...errors import ExitCode, RankFailed
from ..engine.engine import rows_of_all
from ..liveness.alarm import listed

_REMEDY = (
    "call end_period() on all ranks between the same two steps, as a framework's "
    "checkpoint does (save on all ranks), and give all ranks as many steps: where data "
    "are unequal, stop with the shortest, or pass quorum="
)
_LOAD_REMEDY = (
    "load the same weights on all ranks between the same two steps, and what each rank "
    "has of its own by load_state_dict() of the handle, last"
)


class LoopMoment(NamedTuple):
    """The moment of one rank."""

    local_step: int
    ends_period: bool
    """Whether the loop has called ``end_period()``."""
    has_learnt: bool
    """Whether there is anything that was not exchanged."""
    num_loads: int
    loads: int
    """A checksum of the loaded weights."""


def moments_of_all(
    world: int, num_parts: int, own_moment: LoopMoment
) -> Steps[list[LoopMoment]]:
    """The steps by which the ranks of all islands announce their moments.

    There are ``world`` islands of ``num_parts`` ranks.

    Raises ``RankFailed``, on every rank alike, if they do not belong together.
    """
    rows = torch.tensor([own_moment], dtype=torch.int64, device="cpu")
    if world > 1:
        rows = yield from rows_of_all(world, rows[0])
    if num_parts > 1:
        rows = yield from rows_of_all(num_parts, rows.flatten(), Among.SHARDS)
    moments = [LoopMoment(*row) for row in rows.view(-1, len(own_moment)).tolist()]
    for part in range(num_parts):
        refuse_unlike(moments[part * world :][:world])
    for site in range(world):
        _refuse_torn(site, moments[site::world])
    return moments


def _refuse_torn(site: int, moments: Sequence[LoopMoment]) -> None:
    """Raises ``RankFailed`` if the ranks of one island are at different moments."""
    seen = {(one.local_step, one.ends_period, one.num_loads) for one in moments}
    if len(seen) > 1:
        shown = listed([one.local_step for one in moments])
        text = (
            f"the ranks of island {site} exchange after {shown} local steps, and would "
            "hold parts of different models"
        )
        remedy = "step, load and end periods on all ranks of an island alike"
        raise _mistake(f"{text}; {remedy}", (site,), moments)


def refuse_unlike(moments: Sequence[LoopMoment]) -> None:
    """Raises ``RankFailed`` if ranks' moments do not belong together."""
    world = len(moments)
    ranks = range(len(moments))
    ending = tuple(rank for rank in ranks if moments[rank].ends_period)
    if 0 < len(ending) < world:
        others = tuple(rank for rank in ranks if rank not in ending)
        ended = listed([moments[rank].local_step for rank in ending])
        exchanged = listed([moments[rank].local_step for rank in others])
        text = (
            f"rank {listed(ending)} of {world} called end_period() after {ended} local "
            f"steps, and rank {listed(others)} exchanged after {exchanged}"
        )
        raise _mistake(f"{text}; {_REMEDY}", ending, moments)
    if len({(moment.num_loads, moment.loads) for moment in moments}) == 1:
        return
    most = max(moment.num_loads for moment in moments)
    loaded = tuple(rank for rank in ranks if moments[rank].num_loads == most)
    text = "ranks loaded different weights after gw.local_steps, or between other steps"
    if len(loaded) < world:
        others = tuple(rank for rank in ranks if rank not in loaded)
        text = (
            f"rank {listed(loaded)} of {world} loaded weights after gw.local_steps, "
            f"and rank {listed(others)} did not"
        )
    raise _mistake(f"{text}; {_LOAD_REMEDY}", loaded, moments)


def _mistake(
    text: str, ranks: tuple[int, ...], moments: Sequence[LoopMoment]
) -> RankFailed:
    """The error of the last local step among these moments."""
    step = max(moment.local_step for moment in moments)
    return RankFailed(text, ranks=ranks, step=step, exit_code=ExitCode.MISTAKE)
