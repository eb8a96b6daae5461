"""The plan of groups of tensors whose elements are selected from together: omgs' and
cupcake's.
"""

from gradwire.errors import invalid
from gradwire.exchange.planned import exchange_of_setting
from gradwire.planning.data.plan import Plan, PlannedMessage
from gradwire.planning.data.profile import Profile

from .sparse_fusion import (
    Arrival,
    chunks_in,
    is_too_long,
    sparsified,
)


def flat_plan(
    planner: str,
    profile: Profile,
    groups: list[list[Arrival]],
    compressor: str,
    density: float,
    inline: bool,
    ranks_per_host: int = 1,
) -> Plan:
    """The plan of groups whose elements are selected from together and travel by an
    all-gather.

    They are encoded within the backward pass if ``inline``, else on the compute lane. A
    group that is too long for that travels dense. Hosts of several ranks encode their
    sums, which the backward pass cannot wait for.
    """
    if not isinstance(inline, bool):
        raise invalid("inline", inline, "True or False", "leave it out")
    exchange = sparsified(compressor, density)
    exchange_of_setting(exchange)  # refuses what cannot be paired
    return Plan(
        planner=planner,
        model=profile.model,
        settings={"compressor": compressor, "density": density, "inline": inline},
        messages=tuple(
            PlannedMessage(chunks=chunks_in(group))
            if is_too_long(group)
            else PlannedMessage(
                chunks=chunks_in(group),
                exchange=compressor,
                inline=tuple(tensor.name for tensor, _ in group)
                if inline and ranks_per_host == 1
                else (),
            )
            for group in groups
        ),
        exchanges={compressor: exchange},
    )
