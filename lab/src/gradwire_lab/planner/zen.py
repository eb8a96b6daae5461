"""zen: sparse gradients take the scheme that their sparsity makes fastest.

Source: ZEN (OSDI 2025), section 3: the sparsity of the first iterations decides between
    equations 1 and 2.
Differences from the paper: latency, host work and formats count as well, and all
    schemes are compared, the dense all-reduce among them
    (``exchange/sparse_schemes.py``). Gradients that are dense, or that dense is fastest
    for, are merged as MG-WFBP does. Hosts of several ranks add up first, and a scheme
    is among hosts: its gradients are shares of sums, which are denser.
Settings: none; the profile's ``sparsity`` says what is sparse, and by which sparsifier
    if by one. Without it the plan is MG-WFBP's. Gradients that come as rows take a
    scheme that carries these, without loss, whatever dense would take. Hosts do not add
    them up: they travel among all ranks.
Order: backward; a sparse tensor is a message of its own. Nothing is cut; the next
    forward starts when all communication has ended.
"""

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.mgwfbp import mgwfbp

from ..planning.sparse import SparsePart

NOT_WHILE_TRAINING = (
    "attach measures no sparsity: write gw.plan('zen', profile, cluster)"
)
"""The reason why attach takes no name of this planner, and the remedy."""


def zen(profile: Profile, cluster: Cluster) -> Plan:
    """The plan of the fastest scheme for each tensor, by the profile's sparsity.

    Args:
        profile: The model's layers. Its ``sparsity`` tells which gradients are sparse.
        cluster: Ranks, links and measured costs.

    Returns:
        The plan.

    >>> from gradwire import catalogue
    >>> profile = catalogue.load("vgg16")
    >>> cluster = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
    >>> zen(profile, cluster).exchanges  # no gradient is sparse
    {}
    """
    sparse = SparsePart.of(profile, cluster)
    return sparse.beside(mgwfbp(sparse.rest, cluster)).model_copy(
        update={"planner": "zen"}
    )


EXAMPLES = (zen,)
