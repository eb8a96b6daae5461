"""Fusion keeps its laws, and wrong fusions are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planning.data.cluster import Cluster, CodecFit, Host
from gradwire.planning.data.fit import LineFit
from gradwire_lab.laws.inputs import MIXED, profile_of
from gradwire_lab.planning.sparse_fusion import (
    NOTHING,
    Arrival,
    SparseCost,
    arrivals,
    best_fusion,
)
from tests.each import each
from tests.laws import fusion_laws as laws
from tests.laws.fusion_laws import LAWS, Fuse, Groups, last_s
from tests.strategies import bounded

# ---- deliberately wrong ones ---------------------------------------------------------


def greedy(every: Sequence[Arrival], cost: SparseCost) -> Groups:
    """Closes a group as soon as that alone ends earlier; what comes after it is not
    looked at.
    """
    groups: Groups = []
    for one in every:
        apart = [*groups, [one]]
        merged = [*groups[:-1], [*groups[-1], one]] if groups else apart
        groups = merged if last_s(merged, cost) <= last_s(apart, cost) else apart
    return groups


def halves(every: Sequence[Arrival], cost: SparseCost) -> Groups:
    """One split at most, as published code looks for."""
    splits = [
        [list(every)],
        *([list(every[:i]), list(every[i:])] for i in range(1, len(every))),
    ]
    return min(splits, key=lambda groups: last_s(groups, cost))


def each_alone(every: Sequence[Arrival], cost: SparseCost) -> Groups:
    return [[one] for one in every]


def loses_the_last(every: Sequence[Arrival], cost: SparseCost) -> Groups:
    return best_fusion(every[:-1], cost)


def mixes_dtypes(every: Sequence[Arrival], cost: SparseCost) -> Groups:
    return [list(every)]


BITES = (
    (laws.law_no_fusion_ends_earlier, greedy),
    (laws.law_no_fusion_ends_earlier, halves),
    (laws.law_no_fusion_ends_earlier, each_alone),
    (laws.law_groups_are_the_arrivals, loses_the_last),
    (laws.law_groups_are_the_arrivals, mixes_dtypes),
)


# ---- tests ---------------------------------------------------------------------------

lines = st.builds(
    LineFit, alpha_s=st.floats(0.0, 0.02), per_unit_s=st.floats(0.0, 1e-5)
)
MIXED_UP = profile_of(*[([100, 2000], 0.0, 0.004)] * 3, dtypes=MIXED)


def cost_of(
    encode: LineFit, hop_s: float = 1e-3, rate: float = 1e6, host: Host | None = None
) -> SparseCost:
    codecs = {"topk": CodecFit(encode=encode, decode=NOTHING, merge=NOTHING)}
    cluster = Cluster(
        num_ranks=4, rate_bytes_per_s=rate, hop_s=hop_s, codecs=codecs, host=host
    )
    return SparseCost.of(cluster, "topk", 0.1)


@st.composite
def drawn(draw: st.DrawFn) -> list[Arrival]:
    numels = st.lists(st.integers(1, 20_000), max_size=2)
    rows = draw(
        st.lists(st.tuples(numels, st.just(0.0), st.floats(0.0, 0.03)), max_size=5)
    )
    return arrivals(
        profile_of(
            ([], 0.0, 0.0), *rows, dtypes=draw(st.sampled_from((MIXED, MIXED[:1])))
        )
    )


HOST = Host(num_ranks=2, rate_bytes_per_s=1e8, hop_s=1e-5)
costs = st.builds(
    *(cost_of, lines, st.floats(0.0, 2e-2), st.floats(1e5, 1e8)),
    st.sampled_from((None, HOST)),
)


@each("law", LAWS, ids=lambda law: law.__name__)
def test_the_best_fusion_keeps_every_law(law: Callable[..., None]) -> None:
    @bounded(60)
    @given(every=drawn(), cost=costs)
    def holds(every: list[Arrival], cost: SparseCost) -> None:
        law(best_fusion, every, cost)

    law(best_fusion, [], cost_of(NOTHING))
    law(best_fusion, arrivals(MIXED_UP), cost_of(NOTHING))
    holds()


LATENT = cost_of(LineFit(alpha_s=0.01, per_unit_s=1e-6))
RUSH = arrivals(
    profile_of(
        *(
            ([numel], 0.0, 0.01)
            for numel in (2000, 100, 30_000, 100, 20_000, 40_000, 100, 3000)
        )
    )
)


@each("law, fuse", BITES, ids=lambda p: p.__name__)
def test_fusion_law_bites(law: Callable[..., None], fuse: Fuse) -> None:
    def holds(own: Fuse) -> None:
        for every, cost in ((RUSH, LATENT), (arrivals(MIXED_UP), cost_of(NOTHING))):
            law(own, every, cost)

    holds(best_fusion)
    with pytest.raises(AssertionError):
        holds(fuse)


@bounded(40)
@given(every=drawn(), cost=costs)
def test_the_table_of_all_gathers_is_that_of_one(
    every: list[Arrival], cost: SparseCost
) -> None:
    numels = [one.tensor.numel for one in every]
    assert cost.gather_each_s(np.array(numels, dtype=float)).tolist() == [
        cost.gather_s(numel) for numel in numels
    ]


def test_every_law_has_a_specimen() -> None:
    assert {law for law, _ in BITES} == set(LAWS)


def test_tensors_that_stay_whole_are_fused_for_all_ranks_of_a_host_to_have_one() -> (
    None
):
    """Two ranks encode a tensor of 0.1 s each; if both have a half of each, the first
    need not wait for the second.
    """
    two = arrivals(profile_of(([100_000], 0.0, 0.05), ([100_000], 0.0, 0.0)))
    cost = cost_of(
        LineFit(alpha_s=0.0, per_unit_s=1e-6), hop_s=0.0, rate=1e9, host=HOST
    )
    assert len(best_fusion(two, cost)) == 2
    assert len(best_fusion(two, cost, is_whole=True)) == 1
