"""Shared cores: where ranks have too few of them, all that a rank does takes its turn.

Layers and the compute lane were measured on all ranks at once, so their seconds are those of cores
that are shared. What is left is what messages take of the cores themselves: system calls, copies,
checksums. Where computation hides the wire, a clock of lanes alone would have that for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..data.cluster import Cluster
from .supersteps import Superstep


def carrying_s(every: Iterable[Sequence[Superstep]], cluster: Cluster) -> float:
    """Seconds in which a rank's cores carry the verbs of its messages, and compute nothing."""
    if cluster.cores is None or cluster.processors is None:
        return 0.0
    return sum(cluster.busy_s(one.sent_bytes) for own in every for one in own if one.wire)


def missing_s(end_s: float, computing_s: float, carried_s: float, cluster: Cluster) -> float:
    """Seconds that an iteration which ends at ``end_s`` is too short for a rank's share of cores.

    ``computing_s`` are those of layers and of the compute lane, ``carried_s`` those in which cores
    carry verbs.

    >>> cluster = Cluster(num_ranks=4, rate_bytes_per_s=1e8, cores=0.5)
    >>> round(missing_s(0.1, 0.09, 0.03, cluster), 6)
    0.02
    """
    if cluster.cores is None:
        return 0.0
    return max(0.0, computing_s + carried_s - end_s)
