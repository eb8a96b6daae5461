"""The clock against closed forms, exactly, and against a slow exact simulation of shared links."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.simulation.clock import run_on_clock
from gradwire.planning.simulation.closed_form import carry
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.planner.bytescheduler import bytescheduler
from tests.planning.profiles import clusters, exact_cluster, profiles
from tests.strategies import bounded

ALPHA_S = 2**-8
"""Of ``exact_cluster()``: two hops of 2**-9 s; a byte takes 2**-20 s."""


def _overlapped(plan: Plan) -> Plan:
    return plan.model_copy(update={"overlap_forward": True})


def test_single_layer() -> None:
    profile = profile_of(([2**16], 0.25, 0.5))
    cluster = exact_cluster()
    trace = simulate(wfbp(profile, cluster), profile, cluster)
    assert trace.iteration_s == 0.5 + ALPHA_S + 2**18 / 2**20 + 0.25
    assert [(s.lane, s.start_s, s.end_s) for s in trace.spans] == [
        ("backward", 0.0, 0.5),
        ("communication", 0.5, 0.75 + ALPHA_S),
        ("forward", 0.75 + ALPHA_S, 1.0 + ALPHA_S),
    ]
    assert trace.spans[1].size_bytes == 2**18
    assert trace.spans[1].name == f"t0[0:{2**16}]"


def test_all_hidden_but_the_first_layers_message() -> None:
    """Each message fits into the next layer's backward; only layer 0's has nothing to hide in."""
    profile = profile_of(*[([2**14], 0.5, 1.0)] * 5)
    cluster = exact_cluster()
    expected_s = 5 * 1.0 + (ALPHA_S + 2**16 / 2**20) + 5 * 0.5
    for plan in (wfbp(profile, cluster), _overlapped(wfbp(profile, cluster))):
        assert simulate(plan, profile, cluster).iteration_s == expected_s


def test_nothing_hidden_when_only_the_last_layers_backward_takes_time() -> None:
    profile = profile_of(([2**14], 0.5, 0.0), ([2**14], 0.5, 0.0), ([2**14], 0.5, 1.0))
    cluster = exact_cluster()
    message_s = ALPHA_S + 2**16 / 2**20
    waiting = wfbp(profile, cluster)
    assert simulate(waiting, profile, cluster).iteration_s == 1.0 + 3 * message_s + 1.5
    # Forward order: each layer's forward hides the next message.
    ahead = waiting.model_copy(update={"messages": waiting.messages[::-1], "overlap_forward": True})
    assert simulate(ahead, profile, cluster).iteration_s == 1.0 + message_s + 1.5


def test_alone_an_iteration_is_its_computation() -> None:
    profile = profile_of(([5], 0.5, 0.25), ([], 0.5, 0.25), ([7], 0.5, 0.25))
    cluster = exact_cluster(num_ranks=1)
    assert simulate(wfbp(profile, cluster), profile, cluster).iteration_s == 2.25


def test_without_gradients_the_forward_still_follows_the_backward() -> None:
    profile = profile_of(([], 0.5, 0.25), ([], 0.5, 0.25))
    trace = simulate(_overlapped(wfbp(profile, exact_cluster())), profile, exact_cluster())
    assert trace.iteration_s == 1.5
    assert trace.lanes() == [(0, "forward"), (0, "backward")]


def test_two_at_once_share_the_link_and_overlap_their_latencies() -> None:
    """A: latency 0-1, alone until B shares from 2 on; A needs 3 s and B 1 s of the link."""
    carried = carry([0.0, 1.0], [(1.0, 3.0), (1.0, 1.0)], credit=2)
    # A has done 1 at time 2; both do 1 more until 4, where B ends; A's last second is its own.
    assert carried.start_s == [0.0, 1.0]
    assert carried.end_s == [5.0, 4.0]


def test_head_of_the_line_waits_even_if_others_are_ready() -> None:
    carried = carry([4.0, 0.0, 0.0], [(0.5, 1.0)] * 3, credit=1)
    assert carried.start_s == [4.0, 5.5, 7.0]
    assert carried.end_s == [5.5, 7.0, 8.5]


def test_a_lane_that_is_free_early_is_not_used_early() -> None:
    """Message 1 ends first, and message 2 still waits for message 0, whose lane is its own."""
    carried = carry([0.0] * 4, [(0.0, work_s) for work_s in (3.0, 1.0, 1.0, 1.0)], credit=2)
    # 0 and 1 share until 2; 0 is alone until 4; then 2 and 3 share.
    assert carried.start_s == [0.0, 0.0, 4.0, 4.0]
    assert carried.end_s == [4.0, 2.0, 6.0, 6.0]


def test_a_message_waits_for_those_it_names() -> None:
    after = [(), (), (0,)]
    parts_s = [(0.0, work_s) for work_s in (3.0, 1.0, 1.0)]
    carried = carry([0.0] * 3, parts_s, credit=3, after=after)
    assert carried.start_s == [0.0, 0.0, 4.0]
    assert carried.end_s == [4.0, 2.0, 5.0]


def test_by_priority_the_most_urgent_that_is_ready_goes() -> None:
    parts_s = [(0.0, work_s) for work_s in (1.0, 2.0, 1.0)]
    carried = carry([0.0, 0.0, 1.0], parts_s, urgency=[2, 1, 0])
    assert carried.order == [1, 2, 0]


def _slowly(
    ready: Sequence[float], alpha: float, work: Sequence[float], credit: int
) -> list[tuple[Fraction, Fraction]]:
    """Fractions, and what is left of each message written down again at each event."""
    starts: dict[int, Fraction] = {}
    ends: dict[int, Fraction] = {}
    left = {i: Fraction(w) for i, w in enumerate(work)}
    now = Fraction(0)
    while len(ends) < len(work):
        for i in starts:
            if i not in ends and left[i] == 0 and now >= starts[i] + Fraction(alpha):
                ends[i] = now
        head = len(starts)
        lane_is_free = head < credit or head - credit in ends
        if head < len(work) and lane_is_free and Fraction(ready[head]) <= now:
            starts[head] = now
            continue
        open_now = [i for i in starts if i not in ends]
        sharing = [i for i in open_now if now >= starts[i] + Fraction(alpha)]
        events = [starts[i] + Fraction(alpha) for i in open_now if i not in sharing]
        events += [now + left[i] * len(sharing) for i in sharing]
        if head < len(work) and lane_is_free:
            events.append(Fraction(ready[head]))
        if not events:
            break
        until = min(events)
        for i in sharing:
            left[i] -= (until - now) / len(sharing)
        now = until
    return [(starts[i], ends[i]) for i in range(len(work))]


times = st.floats(0.0, 4.0).map(lambda x: round(x, 2))


@bounded(60)
@given(
    jobs=st.lists(st.tuples(times, times), max_size=9),
    alpha=st.sampled_from((0.0, 0.25, 1.0)),
    credit=st.integers(1, 4),
)
def test_sharing_agrees_with_an_exact_simulation(
    jobs: list[tuple[float, float]], alpha: float, credit: int
) -> None:
    ready, work = [r for r, _ in jobs], [w + 0.01 for _, w in jobs]
    carried = carry(ready, [(alpha, work_s) for work_s in work], credit)
    for place, (start, end) in enumerate(_slowly(ready, alpha, work, credit)):
        assert carried.start_s[place] == pytest.approx(float(start), abs=1e-9)
        assert carried.end_s[place] == pytest.approx(float(end), abs=1e-9)


@bounded(30)
@given(profile=profiles(), cluster=clusters, seed=st.integers(0, 99), credit=st.integers(1, 3))
def test_every_order_is_met(profile: Profile, cluster: Cluster, seed: int, credit: int) -> None:
    """No order of messages waits for itself: each ends, so every layer's forward comes."""
    plan = bytescheduler(profile, cluster, partition_bytes=2000, credit=credit)
    messages = list(plan.messages)
    random.Random(seed).shuffle(messages)
    timing = run_on_clock(plan.model_copy(update={"messages": tuple(messages)}), profile, cluster)
    assert timing.message_start_s == sorted(timing.message_start_s)
    for start_s, end_s in zip(timing.message_start_s, timing.message_end_s, strict=True):
        assert end_s >= start_s
    serial_s = sum(cluster.all_reduce_s(size) for size in timing.message_bytes)
    longest_s = profile.backward_s + serial_s + profile.forward_s
    assert timing.iteration_s <= longest_s * (1 + 1e-9)
    assert timing.iteration_s >= (profile.backward_s + profile.forward_s) * (1 - 1e-9)


def test_more_overlap_is_never_slower_in_the_same_order() -> None:
    profile = profile_of(*[([2**14], 0.25, 0.125)] * 6)
    plan = wfbp(profile, exact_cluster())
    waits = simulate(plan, profile, exact_cluster()).iteration_s
    assert simulate(_overlapped(plan), profile, exact_cluster()).iteration_s <= waits


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
