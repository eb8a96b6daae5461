"""selective_fusion: never slower than others, its clock the simulator's, near the best
there is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planning import catalogue
from gradwire.planning.data.cluster import Cluster, CodecFit, Host
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import DENSE
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.ddp import ddp
from gradwire.planning.planner.mgwfbp import mgwfbp
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.price import iteration_s
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.planner.cupcake import cupcake
from gradwire_lab.planner.espresso import espresso
from gradwire_lab.planner.omgs import omgs
from gradwire_lab.planner.selective_fusion import (
    APART,
    AS_ONE,
    _exchanges,
    _planned,
    selective_fusion,
)
from gradwire_lab.planner.ssfusion import VARIANTS, ssfusion
from gradwire_lab.planning.mixing import WHOLE, MixedCost, MixedGroup, Way, improved
from gradwire_lab.planning.mixing_search import first_groups
from tests.lab.test_espresso import cluster_of
from tests.laws.sim_laws import TOLERANCE
from tests.planning.profiles import profiles
from tests.strategies import bounded

OTHERS = (
    wfbp,
    ddp,
    mgwfbp,
    partial(espresso, divisible=False),
    *(
        partial(planner, inline=inline)
        for planner in (cupcake, omgs)
        for inline in (True, False)
    ),
    *(partial(ssfusion, variant=variant) for variant in VARIANTS),
)


@pytest.mark.smoke
@bounded(15)
@given(
    profile=profiles(largest=200_000),
    num_ranks=st.sampled_from((1, 2, 8)),
    rate=st.floats(1e6, 1e9),
    merge=st.sampled_from((0.0, 1e-8)),
)
def test_never_slower_than_the_others(
    profile: Profile, num_ranks: int, rate: float, merge: float
) -> None:
    cluster = cluster_of(num_ranks=num_ranks, rate=rate)
    line = LineFit(alpha_s=0.0, per_unit_s=merge)
    codec = CodecFit(encode=cluster.codecs["dgc"].encode, decode=line, merge=line)
    cluster = cluster.model_copy(update={"codecs": {"dgc": codec, "selective": codec}})
    own_s = iteration_s(selective_fusion(profile, cluster), profile, cluster)
    for other in OTHERS:
        other_s = iteration_s(other(profile, cluster), profile, cluster)
        assert own_s <= other_s * (1 + 1e-9), other


def cost_of(profile: Profile, cluster: Cluster, density: float = 0.01) -> MixedCost:
    exchanges = _exchanges("dgc", density)
    return MixedCost.of(profile, cluster, exchanges[APART], exchanges[AS_ONE], density)


def drawn_groups(cost: MixedCost, draw: random.Random) -> list[MixedGroup]:
    cuts = {0, len(cost.tensors)}
    cuts |= {n for n in range(1, len(cost.tensors)) if draw.random() < 0.4}
    found = []
    for start, stop in pairwise(sorted(cuts)):
        ways: tuple[Way, ...] = tuple(
            draw.choice(list(Way)[:3]) for _ in range(start, stop)
        )
        if draw.random() < 0.3:
            ways = (draw.choice(WHOLE),) * (stop - start)
        found.append(MixedGroup(start, stop, ways))
    return found


model = st.lists(
    st.tuples(
        st.lists(st.integers(1, 2_000_000), min_size=1, max_size=2),
        st.just(0.001),
        st.floats(0.0, 0.02),
    ),
    min_size=1,
    max_size=5,
)


HOST = Host(num_ranks=2, rate_bytes_per_s=1.2e10, hop_s=1e-5)


@bounded(40)
@given(
    rows=model,
    rate=st.floats(1e7, 1e10),
    host=st.sampled_from((None, HOST)),
    draw=st.randoms(use_true_random=False),
)
def test_the_clock_of_groups_is_the_simulators(
    rows: list[tuple[list[int], float, float]],
    rate: float,
    host: Host | None,
    draw: random.Random,
) -> None:
    """Whatever the groups, where nothing is computed behind a transfer.

    Ranks of a host that have whole tensors begin to send apart, and the clock has them
    all wait for the last.
    """
    profile = profile_of(*rows)
    cluster = cluster_of(rate=rate).model_copy(update={"host": host})
    cost = cost_of(profile, cluster)
    groups = drawn_groups(cost, draw)
    plan = _planned(profile, cost, groups, _exchanges("dgc", 0.01))
    found_s = profile.forward_s + cost.seconds(groups)
    assert host is None or not any(one.inline or one.early for one in plan.messages)
    simulated_s = iteration_s(plan, profile, cluster)
    assert found_s == pytest.approx(
        simulated_s, rel=1e-3 if host is None else TOLERANCE
    )
    assert found_s >= simulated_s * (1 - 1e-3)
    better, better_s = improved(groups, cost)
    assert better_s == cost.seconds(better) <= cost.seconds(groups)
    assert [g.start for g in better] + [better[-1].stop] == [
        0,
        *(g.stop for g in better),
    ]
    assert improved(groups, cost, most=0) == (groups, cost.seconds(groups))


def every_fusion(count: int) -> Iterator[list[MixedGroup]]:
    """All groups of so many tensors in all ways."""
    for inner in product((False, True), repeat=count - 1):
        cuts = [0, *(n for n, cut in enumerate(inner, 1) if cut), count]
        options = [
            [
                MixedGroup(start, stop, ways)
                for ways in (
                    *product(list(Way)[:3], repeat=stop - start),
                    *((way,) * (stop - start) for way in WHOLE),
                )
            ]
            for start, stop in pairwise(cuts)
        ]
        yield from map(list, product(*options))


def test_small_models_are_planned_nearly_as_well_as_they_can_be() -> None:
    """Within 2 % of the best of all groups in all ways, and mostly the best itself."""
    draw, over = random.Random(1), []
    for _ in range(25):
        rows = [
            ([int(10 ** draw.uniform(3, 6.7))], 0.0, 10 ** draw.uniform(-3.5, -1.7))
            for _ in range(4)
        ]
        cost = cost_of(profile_of(*rows), cluster_of(rate=10 ** draw.uniform(8, 9.7)))
        least_s = min(cost.seconds(groups) for groups in every_fusion(4))
        own_s = min(
            improved(found, cost)[1] for found in first_groups(cost, as_one=True)
        )
        over.append(own_s / least_s - 1)
    assert max(over) < 0.02
    assert sum(one < 1e-9 for one in over) > 15


def test_something_of_every_tensor_is_sent_if_so_asked_for() -> None:
    """One vector of several tensors may lack one of them."""
    profile, cluster = catalogue.load("resnet152"), cluster_of()
    free, bound = (
        selective_fusion(profile, cluster, every_tensor=one) for one in (False, True)
    )
    assert any(m.exchange == AS_ONE and len(m.chunks) > 1 for m in free.messages)
    for message in bound.messages:
        compressor = bound.exchanges.get(message.exchange)
        assert (
            message.exchange == DENSE
            or len(message.chunks) == 1
            or (compressor is not None and compressor.compressor == "selective")
        )
    seconds = [iteration_s(plan, profile, cluster) for plan in (free, bound)]
    assert (
        seconds[0]
        < seconds[1]
        < iteration_s(ssfusion(profile, cluster), profile, cluster)
    )
