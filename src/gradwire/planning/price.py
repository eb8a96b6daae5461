"""iteration_s: the one figure that planners are compared by."""

from collections.abc import Iterable
from operator import itemgetter

from ..exchange.sparse_schemes import TIE
from .data.cluster import Cluster
from .data.plan import Plan
from .data.profile import Profile
from .simulation.clock import run_on_clock


def iteration_s(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    """Seconds of one iteration: ``simulate(...).iteration_s``, to the last bit."""
    return run_on_clock(plan, profile, cluster).iteration_s


def fewest_messages(priced: Iterable[tuple[float, Plan]], within: float = TIE) -> Plan:
    """The plan of fewest messages ``within`` a share of the best of ``priced``.

    Each pair is the seconds predicted of a plan, and the plan. How much time a message
    costs its host is known least of all that goes into a prediction. So among plans
    that promise the same time, the one with the fewest messages is the safest.
    """
    plans = list(priced)
    best_s = min(seconds for seconds, _ in plans)
    most_s = best_s + within * abs(best_s)
    tied = [(len(plan.messages), s, plan) for s, plan in plans if s <= most_s]
    _, _, fewest = min(tied, key=itemgetter(0, 1))
    return fewest
