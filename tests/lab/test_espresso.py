"""espresso: its clock against the simulator's, its algorithms against readings of their
own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import DENSE, Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.price import iteration_s
from gradwire.planning.simulation.clock import run_on_clock
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.planner.espresso import _exchanges, espresso, select
from gradwire_lab.planner.espresso import _Lanes as espresso_lanes
from gradwire_lab.planning.sparse_fusion import NOTHING
from tests.each import each
from tests.planning.profiles import profiles
from tests.strategies import bounded

ON_DEVICE = LineFit(alpha_s=8.87e-4, per_unit_s=1.865e-10)
BESIDE = LineFit(alpha_s=1.673e-3, per_unit_s=1.494e-9)
"""Lines through SSFusion's table III, over elements of two bytes."""
EXCHANGES = _exchanges("dgc", 0.01, divisible=True)


def cluster_of(
    inline: LineFit = ON_DEVICE,
    beside: LineFit = BESIDE,
    num_ranks: int = 8,
    rate: float = 1.25e9,
) -> Cluster:
    codec = CodecFit(encode=beside, decode=NOTHING, merge=NOTHING)
    return Cluster(
        num_ranks=num_ranks,
        rate_bytes_per_s=rate,
        hop_s=2e-5,
        codecs={"dgc": codec},
        inline={"dgc": inline},
    )


def options(plan: Plan) -> list[tuple[str, bool]]:
    """The exchange of each tensor in backward order, and whether it is encoded
    inline.
    """
    return [(message.exchange, bool(message.inline)) for message in plan.messages]


def chosen(plan: Plan, picked: Sequence[tuple[str, bool]]) -> Plan:
    """The plan with another option for each tensor."""
    messages = [
        message.model_copy(
            update={
                "exchange": exchange,
                "inline": (message.chunks[0].tensor,) if is_inline else (),
            }
        )
        for message, (exchange, is_inline) in zip(plan.messages, picked, strict=True)
    ]
    exchanges = {name: EXCHANGES[name] for name, _ in picked if name != DENSE}
    return plan.model_copy(update={"messages": tuple(messages), "exchanges": exchanges})


drawn = st.lists(
    st.tuples(st.integers(1, 3_000_000), st.floats(0.0, 0.02), st.sampled_from((1, 2))),
    min_size=1,
    max_size=6,
)


def model_of(rows: list[tuple[int, float, int]]) -> Profile:
    return profile_of(
        *[([numel] * count, 0.001, own_s) for numel, own_s, count in rows]
    )


@bounded(30)
@given(
    rows=drawn,
    slow_s=st.floats(1e-5, 5e-3),
    rate=st.floats(1e7, 1e10),
    draw=st.randoms(use_true_random=False),
)
def test_the_lanes_clock_is_the_simulators(
    rows: list[tuple[int, float, int]], slow_s: float, rate: float, draw: random.Random
) -> None:
    """Whatever is chosen for each tensor.

    Means are encoded between two transfers, and wait for offloaded encodes.
    """
    profile = model_of(rows)
    cluster = cluster_of(beside=LineFit(alpha_s=slow_s, per_unit_s=1e-9), rate=rate)
    lanes = espresso_lanes.of(profile, cluster, "dgc", EXCHANGES)
    for place in range(len(lanes.tensors)):
        lanes.options[place] = draw.choice((DENSE, *EXCHANGES))
        lanes.offloaded[place] = draw.random() < 0.5
    picked = [
        (option, option != DENSE and not offloaded)
        for option, offloaded in zip(lanes.options, lanes.offloaded, strict=True)
    ]
    plan = chosen(espresso(profile, cluster), picked)
    assert profile.forward_s + lanes.seconds() == pytest.approx(
        iteration_s(plan, profile, cluster)
    )


def largest_first(profile: Profile, cluster: Cluster) -> list[tuple[str, bool]]:
    """Algorithm 1 by whole simulations, each tensor in turn, bubbles read off the
    timeline.
    """
    base = espresso(profile, cluster, offload=False)
    numels = [message.chunks[0].numel for message in base.messages]
    picked = [(DENSE, False)] * len(numels)

    def seconds(now: list[tuple[str, bool]]) -> float:
        return iteration_s(chosen(base, now), profile, cluster)

    def first_behind(now: list[tuple[str, bool]]) -> int:
        timing = run_on_clock(chosen(base, now), profile, cluster)
        starts = [max(timing.message_start_s[n], 0.0) for n in range(len(numels))]
        found = 0
        for n in range(1, len(numels)):
            if starts[n] > timing.message_end_s[n - 1] * (1 + 1e-12):
                found = n
        return found

    best_s, behind = seconds(picked), first_behind(picked)
    for place in sorted(range(len(numels)), key=lambda n: (-numels[n], n)):
        if place < behind:
            continue
        ways = [
            [*picked[:place], (way, True), *picked[place + 1 :]] for way in EXCHANGES
        ]
        tried = min(ways, key=seconds)
        if seconds(tried) < best_s * (1 - 1e-12):
            picked, best_s = tried, seconds(tried)
            behind = first_behind(picked)
    return picked


@each("rate", [2e8, 1.25e9])
def test_algorithm_1_is_that_of_the_paper(rate: float) -> None:
    rows = [
        (3_000_000, 0.004, 1),
        (500, 0.001, 2),
        (1_500_000, 0.02, 1),
        (3_000_000, 0.004, 2),
        (40_000, 0.002, 1),
        (2_000_000, 0.003, 1),
    ]
    profile, cluster = model_of(rows), cluster_of(rate=rate)
    plan, picked = (
        espresso(profile, cluster, offload=False),
        largest_first(profile, cluster),
    )
    # Push and pull may tie with a gather.
    sparse = [exchange != DENSE for exchange, _ in picked]
    assert [exchange != DENSE for exchange, _ in options(plan)] == sparse
    assert iteration_s(plan, profile, cluster) == pytest.approx(
        iteration_s(chosen(plan, picked), profile, cluster)
    )
    assert any(sparse)


def as_printed(lanes: espresso_lanes) -> list[str]:
    """Algorithm 1 line by line: GetBestOption tries every option of a tensor by F."""
    order = sorted(
        range(len(lanes.tensors)),
        key=lambda place: (-lanes.tensors[place].size_bytes, place),
    )
    removed = set(range(lanes.before_bubbles()))
    for place in order:
        if place in removed:
            continue
        candidates = []
        for option in (DENSE, *EXCHANGES):
            lanes.options[place] = option
            candidates.append((lanes.seconds(), option))
        lanes.options[place] = min(candidates, key=lambda one: one[0])[1]
        removed |= {
            one for one in range(lanes.before_bubbles()) if lanes.options[one] == DENSE
        }
    return lanes.options


@each("seed", range(12))
def test_each_tensor_takes_the_option_of_least_f_of_all(seed: int) -> None:
    """Not the one that is on the wire for the least time: its parts may wait."""
    draw = random.Random(seed)
    rows = [
        (draw.randint(1, 3_000_000), draw.uniform(0.0, 0.02), draw.choice((1, 2)))
        for _ in range(6)
    ]
    profile = model_of(rows)
    slow = LineFit(alpha_s=draw.uniform(1e-4, 5e-3), per_unit_s=2e-9)
    cluster = cluster_of(beside=slow, rate=10 ** draw.uniform(8, 9.3))
    lanes = espresso_lanes.of(profile, cluster, "dgc", EXCHANGES)
    select(lanes)
    other = espresso_lanes.of(profile, cluster, "dgc", EXCHANGES)
    assert lanes.options == as_printed(other)


def test_offloading_is_the_best_of_all_counts() -> None:
    """Of every number of tensors of each size, from either end, by whole
    simulations.
    """
    rows = [(3_000_000, 0.008, 1)] * 4 + [(1_000_000, 0.003, 1)] * 3
    profile, cluster = model_of(rows), cluster_of(rate=4e8)
    inline = espresso(profile, cluster, offload=False)
    found_s = iteration_s(espresso(profile, cluster), profile, cluster)
    sizes = [message.chunks[0].numel for message in inline.messages]
    groups = [
        [n for n, size in enumerate(sizes) if size == one and inline.messages[n].inline]
        for one in sorted(set(sizes))
    ]
    assert sum(map(len, groups)) > 3
    every_s = []
    for step in (1, -1):
        for counts in product(*(range(len(group) + 1) for group in groups)):
            beside = {
                n
                for g, count in zip(groups, counts, strict=True)
                for n in g[::step][:count]
            }
            picked = [
                (exchange, is_inline and n not in beside)
                for n, (exchange, is_inline) in enumerate(options(inline))
            ]
            every_s.append(iteration_s(chosen(inline, picked), profile, cluster))
    assert found_s == pytest.approx(min(every_s))
    assert found_s < iteration_s(inline, profile, cluster)


@pytest.mark.smoke
@bounded(15)
@given(
    profile=profiles(largest=200_000),
    num_ranks=st.sampled_from((1, 2, 5)),
    rate=st.sampled_from((1e5, 1e7)),
    merge=st.sampled_from((0.0, 1e-8)),
)
def test_never_slower_than_with_less_to_choose_from(
    profile: Profile, num_ranks: int, rate: float, merge: float
) -> None:
    """Nor than uncompressed."""
    cluster, line = (
        cluster_of(num_ranks=num_ranks, rate=rate),
        LineFit(alpha_s=0.0, per_unit_s=merge),
    )
    codec = CodecFit(encode=BESIDE, decode=line, merge=line)
    cluster = cluster.model_copy(update={"codecs": {"dgc": codec}})
    plan = espresso(profile, cluster)
    dense = chosen(plan, [(DENSE, False)] * len(plan.messages))
    less = [
        espresso(profile, cluster, divisible=False),
        espresso(profile, cluster, offload=False),
    ]
    own_s = iteration_s(plan, profile, cluster)
    for other in (dense, *less):
        assert own_s <= iteration_s(other, profile, cluster)
    if num_ranks == 1:
        assert plan.exchanges == {}
