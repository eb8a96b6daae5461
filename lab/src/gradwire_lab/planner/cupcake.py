"""cupcake: groups of gradients sparsified as one, cut for the earliest last arrival.

Source: Wang, Wu, Xu and Ng, "Cupcake: A Compression Scheduler for Scalable
    Communication-Efficient Distributed Training" (MLSys 2023): one compression for a
    group of tensors, and a fusion that balances what compressions cost against what
    waits for them. The paper itself was not at hand: read from its public code, and
    from what SSFusion (sections II-D and IV-B) says of it.
Differences from the paper: cuts are found by an exact dynamic programme
    (``planning/sparse_fusion.py``), where published code halves its way to
    one split. Costs are the cluster's lines, where the code measures steps. Of numbers
    of groups that tie, the smallest is taken. The merge of what arrives is not in the
    cost. Gradients of different dtypes are never in one group. Hosts of several ranks
    encode their sums, between two transfers. So an encode there is a part of its
    message, and delays neither the backward pass nor the encodes behind it.
Settings: compressor, a sparsifier by name, and its density. Elements are selected from
    a whole group together, so a tensor of small gradients may send nothing for many
    steps. With ``inline`` the backward pass waits for each encode, as in the paper,
    where both need the GPU. Without, the groups are the same, and are encoded on
    gradwire's compute lane beside it, as they always are where hosts have several
    ranks.
Order: backward; the next forward starts when all communication has ended.
"""

from functools import partial

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile

from ..planning.flat_plan import flat_plan
from ..planning.sparse_fusion import SparseCost, arrivals, best_fusion


def cupcake(
    profile: Profile,
    cluster: Cluster,
    *,
    compressor: str = "dgc",
    density: float = 0.01,
    inline: bool = True,
) -> Plan:
    """The plan of the groups whose sparsified gradients have all arrived earliest.

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
    groups = best_fusion(arrivals(profile), cost)
    settings = compressor, density, inline
    return flat_plan("cupcake", profile, groups, *settings, cluster.ranks_per_host)


EXAMPLES = (cupcake, partial(cupcake, compressor="topk", density=0.1, inline=False))
