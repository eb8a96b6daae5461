"""mgwfbp: layers are merged wherever the latency saved exceeds the wait.

Source: Shi, Chu and Li, "MG-WFBP: Efficient Data Communication for Distributed
    Synchronous SGD Algorithms" (INFOCOM 2019), algorithm 1: layer l is merged into
    layer l - 1 if the gradients of l - 1 are ready less than alpha after the
    communication of l could start.
Differences from the paper: one pass from the last layer to the first, because a merge
    changes only what comes after it (the paper computes all starts again: O(L^2)).
    Layers without gradients are passed over; gradients of different dtypes are never
    merged.
Settings: none; alpha and beta are the cluster's.
Order: backward; the next forward starts when all communication has ended.
"""

from itertools import zip_longest

from ..buckets import buckets, whole_buckets
from ..data.cluster import Cluster
from ..data.plan import Plan
from ..data.profile import Profile
from ..simulation.closed_form import Lane, backward_ends


def mgwfbp(profile: Profile, cluster: Cluster) -> Plan:
    """The plan of MG-WFBP for the cluster's alpha and beta.

    Args:
        profile: The model's layers.
        cluster: Ranks and links.

    Returns:
        The plan.

    >>> from gradwire import catalogue
    >>> profile = catalogue.load("vgg16")
    >>> cluster = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
    >>> len(mgwfbp(profile, cluster).messages) <= 16
    True
    """
    ready_s = backward_ends(profile, cluster)
    groups = []
    merging = []
    link = Lane()
    backward = list(reversed(buckets(profile)))
    for bucket, following in zip_longest(backward, backward[1:]):
        merging.append(bucket)
        starts_s = link.start_s(ready_s[bucket.layer])
        if following and following.dtype == bucket.dtype:
            wait_s = ready_s[following.layer] - starts_s
            if wait_s < cluster.alpha_s:
                continue
        seconds = cluster.all_reduce_s(sum(part.size_bytes for part in merging))
        link.take(ready_s[bucket.layer], seconds)
        groups.append(merging)
        merging = []
    return Plan(
        planner="mgwfbp",
        model=profile.model,
        messages=tuple(whole_buckets(*group) for group in groups),
    )


EXAMPLES = (mgwfbp,)
