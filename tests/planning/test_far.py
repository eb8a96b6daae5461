"""Plans for far hosts: fewer and larger messages in turn, by the runtime's hops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from gradwire.collective.steps.rounds import ROOM_BYTES
from gradwire.collective.steps.travel import FAR_S
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.make_plan import plan
from gradwire.planning.planner.mgwfbp import mgwfbp
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.price import iteration_s
from gradwire_lab.laws.inputs import profile_of
from tests.each import each

ONE_WAY_S = (0.0, 0.0005, 0.002, 0.01, 0.04, 0.2)
RATES = (6.25e6, 1.25e8, 1.25e9)
DEEP = profile_of(*[([600_000 * (1 + layer % 3)], 2e-3, 4e-3) for layer in range(8)])
"""A model of several MB, whose messages go round rings."""

Planner = Callable[[Profile, Cluster], Plan]


def law_fewer_messages_far_away(
    planner: Planner, profile: Profile, clusters: Sequence[Cluster]
) -> None:
    """Of hosts that are farther and farther, none gets a plan of more messages in turn.

    Messages that travel at once count as one: their hops pass at the same time. To do:
    give the planner the costs of ``Cluster``, where a message pays for its hops.
    """
    plans = [planner(profile, cluster) for cluster in clusters]
    counts = [-(-len(made.messages) // made.credit) for made in plans]
    assert counts == sorted(counts, reverse=True), counts


def farther(rate: float, latencies_s: Sequence[float] = ONE_WAY_S) -> list[Cluster]:
    return [
        Cluster(num_ranks=4, rate_bytes_per_s=rate, latency_s=latency_s)
        for latency_s in latencies_s
    ]


@each("name", ["mgwfbp", "usbyte"])
@each("rate", RATES)
def test_farther_hosts_never_get_more_messages(name: str, rate: float) -> None:
    law_fewer_messages_far_away(partial(plan, name), DEEP, farther(rate))


@each("rate", RATES)
def test_auto_sends_at_most_as_often_at_80_ms_as_at_1_ms(rate: float) -> None:
    law_fewer_messages_far_away(
        partial(plan, "auto", fidelity="exact"), DEEP, farther(rate, (0.0005, 0.04))
    )


def test_a_planner_that_takes_distance_for_a_faster_link_breaks_the_law() -> None:
    def broken(profile: Profile, cluster: Cluster) -> Plan:
        near = {"latency_s": 0.0, "hop_s": 1e-3 / (1 + 1e3 * cluster.latency_s)}
        return mgwfbp(profile, cluster.model_copy(update=near))

    with pytest.raises(AssertionError):
        law_fewer_messages_far_away(broken, DEEP, farther(1.25e9))


def test_far_away_one_message_takes_as_long_as_its_hops() -> None:
    """Between far hosts a layer a message costs the distance for each layer."""
    (cluster,) = farther(1.25e9, (0.04,))
    layers_s, merged_s = (
        iteration_s(planner(DEEP, cluster), DEEP, cluster) for planner in (wfbp, mgwfbp)
    )
    assert len(mgwfbp(DEEP, cluster).messages) == 1
    assert layers_s > 1.5 * merged_s


def test_auto_cuts_a_short_model_where_parts_go_straight() -> None:
    """A sum of 3.7 MB takes six hops; eight of at most 512 KiB, four at once, four."""
    short = profile_of(([462_400], 2e-3, 4e-3), ([462_400], 2e-3, 4e-3))
    (cluster,) = farther(1.25e9, (0.9 * FAR_S,))
    made = plan("auto", short, cluster, fidelity="exact")
    numels = [sum(one.numel for one in message.chunks) for message in made.messages]
    assert 4 * max(numels) <= ROOM_BYTES
    assert made.credit > 1
    one = mgwfbp(short, cluster)
    assert len(one.messages) == 1
    assert iteration_s(made, short, cluster) < 0.8 * iteration_s(one, short, cluster)


def test_auto_cuts_nothing_where_all_sizes_go_straight() -> None:
    """A sum of 3.7 MB takes two hops and a note far away, as small ones do."""
    short = profile_of(([462_400], 2e-3, 4e-3), ([462_400], 2e-3, 4e-3))
    (cluster,) = farther(1.25e8, (0.04,))
    made = plan("auto", short, cluster, fidelity="exact")
    assert len(made.messages) <= 2
    one = mgwfbp(short, cluster)
    bytes_s = 1.5 * short.size_bytes / 1.25e8
    assert iteration_s(one, short, cluster) < 0.02 + 3 * 0.04 + bytes_s
