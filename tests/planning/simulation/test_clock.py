"""The clock against closed forms, exactly, and against a slow exact simulation of
shared links.
"""

from __future__ import annotations

from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.simulation.closed_form import carry
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.laws.inputs import profile_of
from tests.planning.profiles import exact_cluster

ALPHA_S = 2**-8
"""Of ``exact_cluster()``: two hops of 2**-9 s; a byte takes 2**-20 s."""


def test_nothing_hidden_when_only_the_last_layers_backward_takes_time() -> None:
    profile = profile_of(([2**14], 0.5, 0.0), ([2**14], 0.5, 0.0), ([2**14], 0.5, 1.0))
    cluster = exact_cluster()
    message_s = ALPHA_S + 2**16 / 2**20
    waiting = wfbp(profile, cluster)
    assert simulate(waiting, profile, cluster).iteration_s == 1.0 + 3 * message_s + 1.5
    # Forward order: each layer's forward hides the next message.
    ahead = waiting.model_copy(
        update={"messages": waiting.messages[::-1], "overlap_forward": True}
    )
    assert simulate(ahead, profile, cluster).iteration_s == 1.0 + message_s + 1.5


def test_by_priority_the_most_urgent_that_is_ready_goes() -> None:
    parts_s = [(0.0, work_s) for work_s in (1.0, 2.0, 1.0)]
    carried = carry([0.0, 0.0, 1.0], parts_s, urgency=[2, 1, 0])
    assert carried.order == [1, 2, 0]


def test_the_hosts_share_of_latencies_passes_one_behind_the_other() -> None:
    cluster = exact_cluster()
    busy = cluster.model_copy(update={"host_share": 1.0})
    ends_s = [
        carry([0.0] * 4, [one.parts_s("all_reduce", 2**14)] * 4, credit=4).end_s
        for one in (cluster, busy)
    ]
    alone_s = cluster.all_reduce_s(2**14)
    work_s = alone_s - cluster.alpha_s
    assert ends_s[0] == [cluster.alpha_s + 4 * work_s] * 4
    assert ends_s[1] == [4 * alone_s] * 4
