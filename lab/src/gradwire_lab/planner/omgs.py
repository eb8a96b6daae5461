"""omgs: tensors are merged, and sparsified as one, while that saves more time.

Source: Shi et al., "Communication-Efficient Distributed Deep Learning with Merged
    Gradient Sparsification on GPUs" (INFOCOM 2020), OMGS-SGD. The paper itself was not
    at hand: read from the authors' public code.
Differences from the paper: costs are the cluster's measured lines and its all-gather,
    where the code has a model of one GPU's top-k. The last tensor is merged by the same
    rule as others, where the code always merges it. Gradients of different dtypes are
    never merged, and neither are 2^31 elements or more, of which an int32 could not
    tell the places. Hosts of several ranks encode their sums, between two transfers. So
    there t_s is 0, and the encode is a part of t_c.
Settings: compressor, a sparsifier by name, and its density. Elements are selected from
    a whole group together, so a tensor of small gradients may send nothing for many
    steps. With ``inline`` the backward pass waits for each encode, as in the paper,
    where both need the GPU. Without, the groups are the same, and are encoded on
    gradwire's compute lane beside it, as they always are where hosts have several
    ranks.
Order: backward; the next forward starts when all communication has ended.

Backward pass and sparsification take turns: the backward of the next tensor waits for
the sparsification of the one before it. From the last tensor down, tensor l is merged
into l - 1 iff

    t_wait = t_b(l-1) + t_s(l, l-1) - t_s(l) - t_s(l-1) - (start of l's message - end of
    its t_s) t_save = t_c(l) + t_c(l-1) - t_c(l, l-1)

t_wait < t_save: what the message of l waits longer for (or less, where one
sparsification of both is shorter than two, or the link is busy anyway) against what one
message takes less than two.
"""

from functools import partial
from itertools import zip_longest

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.simulation.closed_form import Lane

from ..planning.flat_plan import flat_plan
from ..planning.sparse_fusion import (
    MOST_ELEMENTS,
    Arrival,
    SparseCost,
    arrivals,
)


def omgs(
    profile: Profile,
    cluster: Cluster,
    *,
    compressor: str = "dgc",
    density: float = 0.01,
    inline: bool = True,
) -> Plan:
    """The plan of OMGS-SGD for this profile and cluster.

    Args:
        profile: The model's layers.
        cluster: Ranks, links, and the measured costs of ``compressor``.
        compressor: The name of a sparsifier; default "dgc".
        density: The kept fraction k/n of a sparsified message, in (0, 1]; default 0.01.
        inline: True (the default): the backward pass waits for each encode, as in the
            paper. False: encodes run beside it, on gradwire's compute lane. Hosts of
            several ranks always do the second.

    Returns:
        The plan.

    Raises:
        InvalidSetting: The cluster has not measured the compressor, or a value is out
            of range.
    """
    cost = SparseCost.of(cluster, compressor, density)
    groups = _merged(arrivals(profile), cost)
    settings = compressor, density, inline
    return flat_plan("omgs", profile, groups, *settings, cluster.ranks_per_host)


def _merged(every: list[Arrival], cost: SparseCost) -> list[list[Arrival]]:
    """One pass in backward order: a merge changes only what comes after it."""
    groups: list[list[Arrival]] = []
    merging: list[Arrival] = []
    # of what is merged so far
    numel = 0
    backward_s = 0.0
    # as the groups before it leave them
    lane = Lane()
    link = Lane()
    for one, other in zip_longest(every, every[1:]):
        merging.append(one)
        numel = numel + one.tensor.numel
        backward_s = backward_s + one.backward_s
        sparsified_s = lane.free_s + (backward_s + cost.encode_s(numel))
        starts_s = link.start_s(sparsified_s)
        if other and other.tensor.dtype == one.tensor.dtype:
            both = numel + other.tensor.numel
            encodes_s = cost.encode_s(numel) + cost.encode_s(other.tensor.numel)
            longer_s = cost.encode_s(both) - encodes_s
            wait_s = other.backward_s + longer_s - (starts_s - sparsified_s)
            messages_s = cost.gather_s(numel) + cost.gather_s(other.tensor.numel)
            if both <= MOST_ELEMENTS and wait_s < messages_s - cost.gather_s(both):
                continue
        groups.append(merging)
        lane.take(0.0, backward_s + cost.encode_s(numel))
        link.take(sparsified_s, cost.gather_s(numel))
        merging = []
        numel = 0
        backward_s = 0.0
    return groups


EXAMPLES = (omgs, partial(omgs, compressor="topk", density=0.1, inline=False))
