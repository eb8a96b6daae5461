"""selective_fusion: neighbours are fused, dense or sparsified where there is time.

Source: gradwire's own. It takes up SSFusion's selection (Ming et al., ICDE 2026,
    sections IV-B to IV-D), Cupcake's fusion (Wang et al., MLSys 2023) and Espresso's
    offloading (Wang et al., EuroSys 2023).
Differences from the paper: it is of no paper. From SSFusion it differs in these:
    - What is dense, what is sparsified in the backward pass and what on the compute
      lane is decided together with the fusion, by when backward pass, lane and link
      have all ended. SSFusion fuses first, excludes by size against the message before,
      and offloads what is left.
    - So it sends whole tensors dense, large ones too, while the link has nothing else
      to do.
    - The density of what is sparsified is not lowered to make up for that.
    - Neighbours may be sparsified as one vector too, as Cupcake does.
    - Hosts of several ranks encode their sums, between two transfers. So an encode is a
      part of its message there, wherever it is.
    - Plans of other planners, dense ones and sparsified ones, are compared with its own
      by the simulator, and the fastest is returned. So under the model it is never
      slower than they.
Settings: sparsifier by name, and its density; every_tensor, whether something of every
    tensor is sent in each step. Then no neighbours are sparsified as one vector, of
    which a tensor of small gradients may send nothing for many steps.
Order: backward, a group's all-reduce before its all-gather; one message at a time, or
    several where that is faster; the next forward starts when all communication has
    ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from gradwire.errors import invalid
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import (
    DENSE,
    ExchangeSetting,
    Plan,
    PlannedMessage,
    Setting,
)
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.ddp import ddp
from gradwire.planning.planner.mgwfbp import mgwfbp
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.price import TIE, iteration_s

from ..planning.mixing import WHOLE, MixedCost, MixedGroup, Way, improved
from ..planning.mixing_search import first_groups
from ..planning.sparse_fusion import (
    NOTHING,
    Arrival,
    SparseCost,
    arrivals,
    best_fusion,
    chunks_in,
    sparsified,
)
from .cupcake import cupcake
from .espresso import espresso
from .omgs import omgs
from .ssfusion import VARIANTS, ssfusion

APART = "each by itself"
AS_ONE = "as one"
CREDITS = (2, 4)
"""Numbers of messages at once that are tried for the fastest plan; 1 unless another
gains.
"""


def selective_fusion(
    profile: Profile,
    cluster: Cluster,
    *,
    sparsifier: str = "dgc",
    density: float = 0.01,
    every_tensor: bool = False,
) -> Plan:
    """The fastest plan found that fuses dense and sparsified gradients.

    Args:
        profile: The model's layers.
        cluster: Ranks, links, and the measured costs of ``sparsifier``.
        sparsifier: The name of a sparsifier; default "dgc".
        density: The kept fraction k/n of a sparsified message, in (0, 1]; default 0.01.
        every_tensor: True: every tensor sends something in each step, so no neighbours
            are sparsified as one vector. False (the default): they may be, and a tensor
            of small gradients may wait for many steps.

    Returns:
        The plan.

    Raises:
        InvalidSetting: The cluster has not measured the sparsifier, or a value is out
            of range.
    """
    if not isinstance(every_tensor, bool):
        raise invalid("every_tensor", every_tensor, "True or False", "leave it out")
    exchanges = _exchanges(sparsifier, density)
    offloaded = espresso(
        profile, cluster, compressor=sparsifier, density=density, divisible=False
    )
    plans = [offloaded, *_others(profile, cluster, sparsifier, density, every_tensor)]
    if cluster.num_ranks > 1 and arrivals(profile):
        both = exchanges[APART], exchanges[AS_ONE]
        cost = MixedCost.of(profile, cluster, *both, density)
        own_plan = _own(cost, every_tensor, _groups_of(offloaded, cost))
        plans += [_planned(profile, cost, groups, exchanges) for groups in own_plan]
    best_s, _, best = min(
        (
            (iteration_s(plan, profile, cluster), place, plan)
            for place, plan in enumerate(plans)
        ),
        key=lambda row: row[:2],
    )
    for credit in CREDITS if best.credit == 1 else ():
        several = best.model_copy(update={"credit": credit})
        several_s = iteration_s(several, profile, cluster)
        if several_s < best_s * (1 - TIE):
            best_s = several_s
            best = several
    settings: dict[str, Setting] = {
        "sparsifier": sparsifier,
        "density": density,
        "every_tensor": every_tensor,
    }
    return best.model_copy(update={"planner": "selective_fusion", "settings": settings})


def _exchanges(sparsifier: str, density: float) -> dict[str, ExchangeSetting]:
    as_one = sparsified(sparsifier, density)
    apart = ExchangeSetting(
        compressor="selective",
        settings={"sparsifier": sparsifier, "density": density, "num_dense": 0},
        error_feedback=True,
    )
    return {APART: apart, AS_ONE: as_one}


def _others(
    profile: Profile,
    cluster: Cluster,
    sparsifier: str,
    density: float,
    every_tensor: bool,
) -> Iterator[Plan]:
    """Plans of other planners; with ``every_tensor`` none that selects from several as
    one.
    """
    yield from (planner(profile, cluster) for planner in (_dense, wfbp, ddp, mgwfbp))
    for variant in VARIANTS:
        yield ssfusion(
            profile, cluster, variant=variant, sparsifier=sparsifier, density=density
        )
    if not every_tensor:
        for inline in (True, False):
            settings: dict[str, Any] = {"compressor": sparsifier, "density": density}
            yield cupcake(profile, cluster, inline=inline, **settings)
            yield omgs(profile, cluster, inline=inline, **settings)


def _dense(profile: Profile, cluster: Cluster) -> Plan:
    """All-reduces of the groups after which the last one arrives earliest.

    At a density of 0.5 the entries of a sparsified tensor, 8 bytes each, take as many
    bytes as the dense tensor. So the fusion for sparsified gradients serves dense ones
    too. Gradients of 16 bits are counted as if they had 32.
    """
    line = cluster.line("all_reduce")
    cost = SparseCost(density=0.5, encode=NOTHING, gather=line, announces_sizes=False)
    messages = (
        PlannedMessage(chunks=chunks_in(group))
        for group in best_fusion(arrivals(profile), cost)
    )
    return Plan(planner="dense", model=profile.model, messages=tuple(messages))


def _groups_of(plan: Plan, cost: MixedCost) -> list[MixedGroup]:
    """The groups of a plan of ``espresso``: a tensor each, in backward order."""
    groups = []
    for place, message in enumerate(plan.messages):
        way = Way.INLINE if message.inline else Way.EARLY
        if message.exchange == DENSE:
            way = Way.DENSE
        groups.append(MixedGroup(place, place + 1, (way,)))
    return groups


def _own(
    cost: MixedCost, every_tensor: bool, seed: list[MixedGroup]
) -> Iterator[list[MixedGroup]]:
    """The best groups of each search, every change that gains made."""
    for as_one in (False,) if every_tensor else (False, True):
        every = list(first_groups(cost, as_one=as_one))
        if not as_one:
            every.append(seed)
        improvements = (improved(groups, cost, as_one=as_one) for groups in every)
        yield min(improvements, key=lambda pair: pair[1])[0]


def _planned(
    profile: Profile,
    cost: MixedCost,
    groups: list[MixedGroup],
    exchanges: dict[str, ExchangeSetting],
) -> Plan:
    messages = [message for group in groups for message in _messages(group, cost)]
    used = {message.exchange for message in messages}
    return Plan(
        planner="selective_fusion",
        model=profile.model,
        messages=tuple(messages),
        exchanges={
            name: exchange for name, exchange in exchanges.items() if name in used
        },
    )


def _messages(group: MixedGroup, cost: MixedCost) -> Iterator[PlannedMessage]:
    def those(*ways: Way) -> list[Arrival]:
        return [Arrival(cost.tensors[place], 0.0) for place in group.places(*ways)]

    def names(*ways: Way) -> tuple[str, ...]:
        return tuple(arrival.tensor.name for arrival in those(*ways) if cost.is_flat)

    if dense := those(Way.DENSE):
        yield PlannedMessage(chunks=chunks_in(dense))
    if apart := those(Way.EARLY, Way.INLINE):
        yield PlannedMessage(
            chunks=chunks_in(apart),
            exchange=APART,
            inline=names(Way.INLINE),
            early=names(Way.EARLY),
        )
    if whole := those(*WHOLE):
        inline = names(Way.ONE_INLINE)
        yield PlannedMessage(chunks=chunks_in(whole), exchange=AS_ONE, inline=inline)


EXAMPLES = (
    selective_fusion,
    partial(selective_fusion, sparsifier="topk", density=0.1, every_tensor=True),
)
