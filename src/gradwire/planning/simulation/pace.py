"""Pace: a rank's model computes more slowly while the rank's compute lane is busy.

Where ranks have fewer cores than threads that compute, an encode beside the backward pass takes
processor time away from it. ``Cluster.beside`` is the pace that is left. The lane's own seconds
stay as they are: what the two take together is the same, whoever is served first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...contract.trace.span import Span
from ..data.cluster import Cluster
from .supersteps import Superstep

# ---- pace --------------------------------------------------------------------------------------


HAIR = 1e-12
"""The share of a time that rounding may have left of it."""


@dataclass(frozen=True)
class Pace:
    """The stretches of time in which a rank's compute lane is busy, and the pace beside it.

    >>> pace = Pace(((1.0, 2.0), (4.0, 5.0)), 0.5)
    >>> pace.end_s(0.0, 1.5), pace.end_s(1.5, 3.0)
    (2.0, 5.25)
    """

    busy: tuple[tuple[float, float], ...]
    """Starts and ends in seconds, ascending; none overlap."""
    beside: float

    @classmethod
    def of(cls, spans: Iterable[Span], beside: float, rank: int = 0) -> Pace:
        """The pace beside the compute spans of a rank; where it is 1, nothing is slowed down."""
        if beside == 1:
            return cls((), 1.0)
        own = (one for one in spans if one.rank == rank and one.lane == "compute")
        return cls(tuple(sorted((one.start_s, one.end_s) for one in own if one.duration_s)), beside)

    def end_s(self, start_s: float, seconds: float) -> float:
        """The second at which a computation ends that takes ``seconds`` where nothing disturbs."""
        now_s, left_s = start_s, seconds
        for from_s, until_s in self.busy:
            if until_s <= now_s:
                continue
            free_s = max(0.0, from_s - now_s)
            if left_s <= free_s + HAIR * (1 + from_s):  # a lane that this end itself makes busy
                break
            now_s, left_s = max(now_s, from_s), left_s - free_s
            done_s = (until_s - now_s) * self.beside
            if left_s <= done_s:
                return now_s + left_s / self.beside
            now_s, left_s = until_s, left_s - done_s
        return now_s + left_s


# ---- Shared cores ------------------------------------------------------------------------------
#
# Where ranks have too few of them, all that a rank does takes its turn.
#
# Layers and the compute lane were measured on all ranks at once, so their seconds are those of
# cores that are shared. What is left is what messages take of the cores themselves: system calls,
# copies, checksums. Where computation hides the wire, a clock of lanes alone would have that for
# nothing.


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
