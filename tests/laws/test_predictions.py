"""What planners predict, and what the simulator says of their plans, is the same number."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import pytest

from gradwire.contract.registry import examples
from gradwire.planning.data.cluster import Cluster, CodecFit, Host
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import DENSE, Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.fusion import NOTHING
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
    and else as near as ranks are that begin an exchange together. Among them are messages that are
    within a host at once."""
    predicted_s = predict(plan, profile, cluster)
    one_s = simulate(plan, profile, cluster).iteration_s
    must(predicted_s == one_s, f"{predicted_s} s were predicted, and one rank takes {one_s} s")
    all_s = simulate(plan, profile, cluster, ranks="all").iteration_s
    is_dense = all(message.exchange == DENSE for message in plan.messages)
    is_alone = plan.credit == 1 or cluster.ranks_per_host == 1
    allowed = SLACK if is_dense and is_alone else TOLERANCE
    must(abs(predicted_s - all_s) <= allowed * all_s, f"{predicted_s} s, all ranks take {all_s} s")


@pytest.mark.parametrize("planner", examples("planner"), ids=name_of)
def test_predicted_is_simulated(planner: Planner) -> None:
    for number, num_ranks in enumerate((3, 5, 8)):
        place = (crc32(name_of(planner).encode()) + number) % len(CLUSTERS)
        cluster = [*CLUSTERS.values()][place].model_copy(update={"num_ranks": num_ranks})
        plan = planner(PROFILE, measured(cluster))
        law_predicted_is_simulated(iteration_s, plan, PROFILE, measured(cluster))


HOSTS = {
    per_host: SLOW.model_copy(
        update={
            "num_ranks": num_ranks,
            "host": Host(num_ranks=per_host, rate_bytes_per_s=1e8, hop_s=1e-5),
        }
    )
    for per_host, num_ranks in ((2, 6), (4, 8))
}
"""Clusters whose hosts have several ranks; these divide the messages of ``PROFILE``."""


@pytest.mark.parametrize("planner", examples("planner"), ids=name_of)
def test_predicted_is_simulated_on_hosts(planner: Planner) -> None:
    cluster = measured(HOSTS[2 + 2 * (crc32(name_of(planner).encode()) % 2)])
    plan = planner(PROFILE, cluster)
    law_predicted_is_simulated(iteration_s, plan, PROFILE, cluster)
    # Hosts encode their sums, so nothing is encoded before a message is launched.
    assert not any(message.inline or message.early for message in plan.messages)
    other = planner(PROFILE, cluster.model_copy(update={"host": None}))
    if any(message.inline or message.early for message in other.messages):
        timing = run_on_clock(other, PROFILE, cluster)
        assert (list(timing.inline), timing.early_s) == ([], 0)


FREE = dict.fromkeys(
    ("dgc", "topk", "onebit", "int8", "powersgd"),
    CodecFit(encode=NOTHING, decode=NOTHING, merge=NOTHING),
)


@pytest.mark.parametrize(
    "planner",
    [
        one
        for one in examples("planner")
        if not any(word in name_of(one) for word in ("bytes", "ssfusion", "selective_fusion"))
    ],
    ids=name_of,
)
def test_hosts_are_ranks_of_thinner_links_and_shorter_tensors(planner: Planner) -> None:
    """Where nothing costs time within a host: an L-th of the elements, and of the link for each.

    Not for planners that keep tensors whole, nor for settings that count bytes.
    """
    rows = [([64, 912], 0.002, 0.001), ([], 0.001, 0.001), ([3200, 80_000], 0.001, 0.002)]
    host = Host(num_ranks=2, rate_bytes_per_s=1e18)
    hosts = Cluster(num_ranks=8, rate_bytes_per_s=1e7, hop_s=1e-4, host=host, codecs=FREE)
    thin = Cluster(num_ranks=4, rate_bytes_per_s=5e6, hop_s=1e-4, codecs=FREE)
    whole, short = (
        profile_of(*[([n // share for n in numels], *times) for numels, *times in rows])
        for share in (1, 2)
    )
    thin_s = iteration_s(planner(short, thin), short, thin)
    assert iteration_s(planner(whole, hosts), whole, hosts) == pytest.approx(thin_s, rel=1e-9)


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
