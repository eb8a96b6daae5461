"""iteration_s: the one figure planners are compared by, without the spans of a trace."""

from __future__ import annotations

from ..cost.cluster import Cluster
from ..cost.profile import Profile
from ..sim.clock import run
from ._types import Plan


def iteration_s(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    """Seconds of one iteration under the model: ``simulate(...).iteration_s``, to the last bit."""
    return run(plan, profile, cluster).iteration_s
