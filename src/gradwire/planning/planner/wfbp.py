"""wfbp: wait-free backward propagation, a message for each layer as it ends.

Source: Zhang et al., "Poseidon" (USENIX ATC 2017), section 3.1; figure 2a of US-Byte.
Differences from the paper: a layer that mixes dtypes needs one message for each. As in
    the paper, the next forward starts when all communication has ended.
Settings: none.
Order: backward; nothing is cut, nothing is merged.
"""

from ..buckets import buckets, whole_buckets
from ..data.cluster import Cluster
from ..data.plan import Plan
from ..data.profile import Profile


def wfbp(profile: Profile, cluster: Cluster) -> Plan:
    """The plan of wait-free backward propagation.

    Args:
        profile: The model's layers.
        cluster: Ranks and links, which change nothing here.

    Returns:
        The plan.

    >>> from gradwire import catalogue
    >>> profile = catalogue.load("vgg16")
    >>> cluster = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
    >>> len(wfbp(profile, cluster).messages)
    16
    """
    return Plan(
        planner="wfbp",
        model=profile.model,
        messages=tuple(whole_buckets(bucket) for bucket in reversed(buckets(profile))),
    )


EXAMPLES = (wfbp,)
