"""wfbp, ddp, mgwfbp and bytescheduler, each against something that is not itself."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.ddp import ddp
from gradwire.planning.planner.mgwfbp import mgwfbp
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.simulation.clock import run_on_clock
from gradwire_lab.laws.inputs import MIXED, profile_of
from gradwire_lab.planner.bytescheduler import bytescheduler
from tests.planning.profiles import clusters, exact_cluster
from tests.strategies import bounded


def _tensors(plan: Plan) -> list[list[str]]:
    return [[chunk.tensor for chunk in message.chunks] for message in plan.messages]


def test_a_layer_of_two_dtypes_takes_two_messages() -> None:
    mixed = profile_of(([6, 5, 4], 0.0, 0.0), dtypes=MIXED)
    assert sorted(_tensors(wfbp(mixed, exact_cluster()))) == [["t0", "t2"], ["t1"]]


@bounded(40)
@given(
    numels=st.lists(st.integers(1, 400), min_size=1, max_size=30),
    first_bytes=st.integers(1, 1500),
    bucket_bytes=st.integers(1, 4000),
)
def test_ddp_fills_buckets_as_torch_does(
    numels: list[int], first_bytes: int, bucket_bytes: int
) -> None:
    profile = profile_of(*[([numel], 0.0, 0.0) for numel in numels])
    plan = ddp(
        profile,
        exact_cluster(),
        first_bucket_bytes=first_bytes,
        bucket_bytes=bucket_bytes,
    )
    arriving = [torch.empty(numel) for numel in reversed(numels)]
    order = list(range(len(numels)))
    torchs, _ = dist._compute_bucket_assignment_by_size(
        arriving, [first_bytes, bucket_bytes], [False] * len(numels), order
    )
    names = [f"t{place}" for place in reversed(range(len(numels)))]
    assert _tensors(plan) == [[names[place] for place in bucket] for bucket in torchs]


def test_ddp_keeps_dtypes_apart() -> None:
    profile = profile_of(*[([40], 0.0, 0.0)] * 6, dtypes=MIXED)
    plan = ddp(profile, exact_cluster(), first_bucket_bytes=200, bucket_bytes=1000)
    assert _tensors(plan) == [["t4", "t2"], ["t5", "t3", "t1"], ["t0"]]


def _as_printed(profile: Profile, cluster: Cluster) -> list[list[str]]:
    """Algorithm 1 of MG-WFBP line by line, layers from 1; every layer owns one
    tensor.
    """
    num = len(profile.layers)
    a, b = cluster.alpha_s, cluster.beta_s_per_byte
    p = {i + 1: float(layer.size_bytes) for i, layer in enumerate(profile.layers)}
    ready, now = {}, 0.0
    for i in range(num, 0, -1):
        now += profile.layers[i - 1].backward_s
        ready[i] = now
    t_c = {i: a + b * p[i] for i in p}

    def starts() -> dict[int, float]:
        tau = {num: ready[num]}
        for i in range(num - 1, 0, -1):
            tau[i] = max(tau[i + 1] + t_c[i + 1], ready[i])
        return tau

    groups: list[list[str]] = [[]]
    tau = starts()
    for i in range(num, 0, -1):
        groups[-1].append(f"t{i - 1}")
        if i > 1 and ready[i - 1] - tau[i] < a:
            t_c[i] = 0.0
            p[i - 1] += p[i]
            t_c[i - 1] = a + b * p[i - 1]
            tau = starts()
        else:
            groups.append([])
    return groups[:-1]


@bounded(60)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 3000), st.floats(1e-5, 2e-2)), min_size=1, max_size=12
    ),
    cluster=clusters,
)
def test_mgwfbp_merges_as_its_algorithm_is_printed(
    rows: list[tuple[int, float]], cluster: Cluster
) -> None:
    profile = profile_of(*[([numel], 0.0, backward_s) for numel, backward_s in rows])
    assert _tensors(mgwfbp(profile, cluster)) == _as_printed(profile, cluster)


@bounded(30)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 400), st.floats(1e-4, 2e-2)), min_size=1, max_size=6
    ),
    cluster=clusters,
    credit=st.integers(1, 4),
)
def test_bytescheduler_never_passes_over_a_more_urgent_block(
    rows: list[tuple[int, float]], cluster: Cluster, credit: int
) -> None:
    """Its fixed order, carried out with the head of the line waiting, is the schedule
    itself.
    """
    profile = profile_of(*[([numel], 0.0, backward_s) for numel, backward_s in rows])
    plan = bytescheduler(profile, cluster, partition_bytes=256, credit=credit)
    timing = run_on_clock(plan, profile, cluster)
    for place, message in enumerate(plan.messages):
        start_s = timing.message_start_s[place]
        mine = int(message.chunks[0].tensor[1:])
        for later in plan.messages[place + 1 :]:
            other = int(later.chunks[0].tensor[1:])
            assert other >= mine or timing.backward_end_s[other] > start_s


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 400), st.floats(0.0, 1.0)), min_size=1, max_size=12
    ),
    cluster=clusters,
    credit=st.integers(1, 6),
    credit_bytes=st.integers(1, 2000),
)
def test_a_credit_in_bytes_bounds_the_bytes_on_their_way(
    rows: list[tuple[int, float]], cluster: Cluster, credit: int, credit_bytes: int
) -> None:
    profile = profile_of(*[([numel], 0.0, backward_s) for numel, backward_s in rows])
    plan = bytescheduler(
        profile,
        cluster,
        partition_bytes=256,
        credit=credit,
        credit_bytes=credit_bytes,
    )
    timing = run_on_clock(plan, profile, cluster)
    sizes = [4 * sum(c.stop - c.start for c in m.chunks) for m in plan.messages]
    for place, start_s in enumerate(timing.message_start_s):
        # Of messages that start and end in one second the later ones come after.
        under_way = [
            sizes[other]
            for other in range(place)
            if timing.message_end_s[other] > start_s
        ]
        assert len(under_way) < credit
        assert not under_way or sum(under_way) + sizes[place] <= credit_bytes


def test_a_credit_in_bytes_lets_more_small_blocks_travel_than_large_ones() -> None:
    profile = profile_of(*[([numel], 0.0, 0.0) for numel in (250, 250, 10, 10, 10)])
    plan = bytescheduler(
        profile, exact_cluster(), partition_bytes=1000, credit=8, credit_bytes=1000
    )
    assert [message.after for message in plan.messages] == [(), (0,), (1,), (), ()]
