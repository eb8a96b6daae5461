"""usbyte against brute force, against wfbp and sequential order, and theorem 1."""

from __future__ import annotations

import itertools
import random

from hypothesis import example, given
from hypothesis import strategies as st

from gradwire.planning.buckets import buckets
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.price import iteration_s
from gradwire.planning.simulation.clock import run_on_clock
from gradwire_lab.laws.inputs import MIXED, profile_of
from gradwire_lab.planner.usbyte import usbyte
from gradwire_lab.planning.phases import (
    Instance,
    UnequalBlock,
    messages_of_blocks,
)
from gradwire_lab.planning.tune import search_space, tune
from tests.calls import num_calls
from tests.each import each
from tests.planning.profiles import (
    clusters,
    exact_cluster,
    profiles,
    random_instance,
)
from tests.strategies import bounded

ROUNDING = 1e-12
"""Relative: the same seconds added up in another order."""

EIGHT = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)


def _instance(profile: Profile, cluster: Cluster, basic_bytes: int) -> Instance:
    return Instance.of(profile, cluster, buckets(profile), basic_bytes)


def _brute_force_s(instance: Instance) -> float:
    """The best of all orders of priority in the first phase, under the same merging
    rule.
    """
    orders = itertools.permutations(range(len(instance.layer)))
    return min(instance.iteration_s(instance.blocks(place)) for place in orders)


@each("num_layers, num_instances", [(3, 30), (5, 30), (6, 6)])
def test_within_5_percent_of_brute_force(num_layers: int, num_instances: int) -> None:
    draw = random.Random(num_layers)
    for _ in range(num_instances):
        profile, cluster, basic_bytes = random_instance(draw, num_layers)
        plan = usbyte(profile, cluster, basic_partition_bytes=basic_bytes)
        best_s = _brute_force_s(_instance(profile, cluster, basic_bytes))
        assert iteration_s(plan, profile, cluster) <= 1.05 * best_s


DEAR = Cluster(
    num_ranks=3,
    rate_bytes_per_s=4e6,
    hop_s=0.0,
    collectives={"all_reduce": LineFit(alpha_s=9e-5, per_unit_s=1.8e-5)},
)
"""All-reduces take longer here than the verbs of 16-bit values."""
CHEAP = Cluster(
    num_ranks=2,
    rate_bytes_per_s=1.35e5,
    hop_s=1.8e-6,
    collectives={"all_reduce": LineFit(alpha_s=6e-4, per_unit_s=3.4e-7)},
)
"""All-reduces take less time here than the verbs of 16-bit values."""


@bounded(60)
@given(profile=profiles(), cluster=clusters, basic_bytes=st.integers(1, 9000))
@example(
    profile=profile_of(
        ([1749, 564], 0.0, 0.004),
        ([2661, 2393], 0.0, 0.0),
        ([297, 1774], 0.0, 0.006),
        ([921], 0.002, 0.001),
        dtypes=MIXED[1:],
    ),
    cluster=DEAR,
    basic_bytes=1640,
)
@example(
    profile=profile_of(
        ([266, 2335], 1.4e-4, 4.8e-3),
        ([776, 234], 0.0, 0.0),
        ([897, 1861], 0.0, 0.0),
        dtypes=MIXED,
    ),
    cluster=CHEAP,
    basic_bytes=3279,
)
def test_never_longer_than_wfbp_nor_than_sequential_order(
    profile: Profile, cluster: Cluster, basic_bytes: int
) -> None:
    plan = usbyte(profile, cluster, basic_partition_bytes=basic_bytes)
    took_s = iteration_s(plan, profile, cluster)
    instance = _instance(profile, cluster, basic_bytes)
    blocks = instance.blocks(range(len(instance.layer)))
    messages = messages_of_blocks(buckets(profile), instance, blocks)
    sequential = plan.model_copy(update={"messages": messages})
    for other in (sequential, wfbp(profile, cluster)):
        assert took_s <= iteration_s(other, profile, cluster) * (1 + ROUNDING)


def _second_phase(plan: Plan, profile: Profile, cluster: Cluster) -> int:
    """Number of the first message that starts when the backward pass has ended."""
    timing = run_on_clock(plan, profile, cluster)
    backward_s = timing.backward_end_s[0]
    return sum(start_s < backward_s for start_s in timing.message_start_s)


def test_theorem_1_no_other_order_of_the_second_phase_is_shorter() -> None:
    draw = random.Random(4)
    num_tried = 0
    for _ in range(40):
        profile, cluster, basic_bytes = random_instance(draw, draw.randint(2, 12))
        plan = usbyte(profile, cluster, basic_partition_bytes=basic_bytes)
        sequential_s = iteration_s(plan, profile, cluster)
        start = _second_phase(plan, profile, cluster)
        for _ in range(10 if len(plan.messages) - start > 1 else 0):
            tail = list(plan.messages[start:])
            draw.shuffle(tail)
            other = plan.model_copy(
                update={"messages": (*plan.messages[:start], *tail)}
            )
            assert iteration_s(other, profile, cluster) >= sequential_s * (1 - ROUNDING)
            num_tried += 1
    assert num_tried > 100


def test_blocks_are_unequal_and_cross_tensors() -> None:
    """One layer of three tensors whose message is interrupted by a more urgent layer.

    64 bytes a second, basic blocks of 16 bytes; t1..t3 are 256 bytes and ready after 1
    s. The middle layer takes 1.5 s: 6 blocks fit. Then t0 is more urgent, then the rest
    goes.
    """
    profile = profile_of(([16], 1.0, 0.5), ([20, 20, 24], 8.0, 1.0))
    cluster = exact_cluster(hop_s=0.0, rate=64.0)
    plan = usbyte(profile, cluster, basic_partition_bytes=16)
    cuts = [
        [(c.tensor, c.start, c.stop) for c in message.chunks]
        for message in plan.messages
    ]
    assert cuts == [
        [("t1", 0, 8)],
        [("t0", 0, 16)],
        [("t1", 8, 20), ("t2", 0, 20), ("t3", 0, 24)],
    ]


def test_under_the_papers_name_one_block_travels_and_nothing_is_merged() -> None:
    """Tuned or not: the search is that of S_p alone."""
    assert list(search_space(usbyte)) == ["basic_partition_bytes"]
    draw = random.Random(12)
    for _ in range(8):
        profile, cluster, _ = random_instance(draw, draw.randint(2, 8))
        layer_of = {
            t.name: i for i, la in enumerate(profile.layers) for t in la.tensors
        }
        for plan in (
            usbyte(profile, cluster),
            tune("usbyte", profile, cluster, trials=4),
        ):
            assert (plan.planner, plan.credit) == ("usbyte", 1)
            assert set(plan.settings) == {"basic_partition_bytes"}
            for message in plan.messages:
                assert len({layer_of[chunk.tensor] for chunk in message.chunks}) == 1


def test_400_layers_are_planned_in_seconds() -> None:
    """It takes 1.4 million calls and 0.3 CPU seconds. A cubic search would make 60
    million.
    """
    profile, _, _ = random_instance(random.Random(0), 400)
    plan = usbyte(profile, EIGHT)
    assert num_calls(lambda: usbyte(profile, EIGHT)) < 4e6
    assert (
        len(plan.messages) >= sum(1 for layer in profile.layers if layer.tensors) > 300
    )


def test_nothing_is_cut_when_all_communication_is_hidden() -> None:
    profile = profile_of(([4], 1.0, 8.0), ([64], 1.0, 8.0), ([64], 1.0, 8.0))
    cluster = exact_cluster(hop_s=2**-4, rate=256.0)
    plan = usbyte(profile, cluster, basic_partition_bytes=16)
    assert [len(message.chunks) for message in plan.messages] == [1, 1, 1]
    assert iteration_s(plan, profile, cluster) == 24 + 0.125 + 16 / 256 + 3


def test_in_a_gap_shorter_than_the_latency_one_block_is_sent() -> None:
    """Equations 4 to 7, where a byte costs nothing: the gap is 0.25 s and the latency
    0.5 s.
    """
    latency = LineFit(alpha_s=0.5, per_unit_s=0.0)
    profile = profile_of(([4], 1.0, 0.25), ([64], 1.0, 0.25), ([64], 1.0, 0.25))
    cluster = exact_cluster().model_copy(
        update={"collectives": {"all_reduce": latency}}
    )
    blocks = _instance(profile, cluster, 16).blocks([0, 1, 2])
    assert blocks[0] == UnequalBlock(
        bucket=2, first_basic=0, num_basic=1, start_s=0.25, end_s=0.75
    )
    # Layer 0's own message is the one that nothing hides: from 0.75 s on, when it is
    # ready.
    plan = usbyte(profile, cluster, basic_partition_bytes=16)
    assert iteration_s(plan, profile, cluster) == 1.25 + 3.0


def test_planned_starts_and_ends_are_what_the_plan_gives() -> None:
    draw = random.Random(3)
    for _ in range(60):
        profile, cluster, basic_bytes = random_instance(draw, draw.randint(1, 8))
        instance = _instance(profile, cluster, basic_bytes)
        plan = usbyte(profile, cluster, basic_partition_bytes=basic_bytes)
        places = itertools.islice(
            itertools.permutations(range(len(instance.layer))), 24
        )
        schedules = [instance.blocks(place) for place in places]
        assert iteration_s(plan, profile, cluster) <= instance.iteration_s(schedules[0])
        for blocks in (*schedules, instance.uncut()):
            for before, after in itertools.pairwise(blocks):
                assert after.start_s >= before.end_s
                assert after.bucket != before.bucket, (
                    "neighbours of one bucket were not merged"
                )
            counts = [0] * len(instance.layer)
            for block in blocks:
                assert block.first_basic == counts[block.bucket]
                counts[block.bucket] += block.num_basic
                assert (
                    block.start_s >= instance.layer_ends_s[instance.layer[block.bucket]]
                )
            assert counts == instance.num_basic
