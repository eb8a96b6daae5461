"""What planners predict, and what the simulator says of their plans, is the same number."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import pytest

from gradwire.contract.registry import examples
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import DENSE, Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.price import iteration_s
from gradwire.planning.simulation.clock import run_on_clock
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.laws.planners import Planner
from gradwire_lab.laws.tolerance import must
from tests.laws.cases import name_of
from tests.laws.sim_laws import SLACK, TOLERANCE
from tests.planning.profiles import measured

Predict = Callable[[Plan, Profile, Cluster], float]

PROFILE = profile_of(
    ([64, 900], 0.002, 0.001), ([], 0.001, 0.001), ([3000], 0.001, 0.002), ([400], 0.001, 0.002)
)
BENT = LineFit(
    alpha_s=1e-4, per_unit_s=1e-7, samples=((64, 2e-4), (2048, 3e-4), (8192, 1e-3), (20000, 2e-3))
)
SLOW = Cluster(num_ranks=2, rate_bytes_per_s=1e6, hop_s=1e-4)
CLUSTERS = {
    "slow": SLOW,
    "latent": SLOW.model_copy(update={"rate_bytes_per_s": 1e8, "hop_s": 1e-3}),
    "bent": SLOW.model_copy(
        update={"collectives": dict.fromkeys(("all_reduce", "all_gather"), BENT), "host_share": 0.5}
    ),
}


def law_predicted_is_simulated(
    predict: Predict, plan: Plan, profile: Profile, cluster: Cluster
) -> None:
    """To the last bit for a rank that stands for all. On all ranks to rounding where all is dense,
    and else as near as ranks are that begin an exchange together."""
    predicted_s = predict(plan, profile, cluster)
    one_s = simulate(plan, profile, cluster).iteration_s
    must(predicted_s == one_s, f"{predicted_s} s were predicted, and one rank takes {one_s} s")
    all_s = simulate(plan, profile, cluster, ranks="all").iteration_s
    is_dense = all(message.exchange == DENSE for message in plan.messages)
    allowed = SLACK if is_dense else TOLERANCE
    must(abs(predicted_s - all_s) <= allowed * all_s, f"{predicted_s} s, all ranks take {all_s} s")


@pytest.mark.parametrize("planner", examples("planner"), ids=name_of)
def test_predicted_is_simulated(planner: Planner) -> None:
    for number, num_ranks in enumerate((3, 5, 8)):
        place = (crc32(name_of(planner).encode()) + number) % len(CLUSTERS)
        cluster = [*CLUSTERS.values()][place].model_copy(update={"num_ranks": num_ranks})
        plan = planner(PROFILE, measured(cluster))
        law_predicted_is_simulated(iteration_s, plan, PROFILE, measured(cluster))


def forgets_latency(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    return iteration_s(plan, profile, cluster.model_copy(update={"hop_s": 0.0}))


def sends_all_at_once(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    return iteration_s(plan.model_copy(update={"credit": 9}), profile, cluster)


def forgets_the_next_forward(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    return run_on_clock(plan, profile, cluster).message_end_s[-1]


@pytest.mark.parametrize(
    "wrong", [forgets_latency, sends_all_at_once, forgets_the_next_forward], ids=name_of
)
def test_the_law_bites(wrong: Predict) -> None:
    cluster = SLOW.model_copy(update={"num_ranks": 3})
    plan = wfbp(PROFILE, cluster)
    law_predicted_is_simulated(iteration_s, plan, PROFILE, cluster)
    with pytest.raises(AssertionError):
        law_predicted_is_simulated(wrong, plan, PROFILE, cluster)
