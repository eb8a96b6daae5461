"""cupcake and omgs: against closed forms, an independent reading, and the clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.planner.cupcake import cupcake
from gradwire_lab.planner.omgs import omgs
from gradwire_lab.planning.sparse_fusion import NOTHING, SparseCost, arrivals
from tests.strategies import bounded


def cluster_of(
    encode: LineFit = NOTHING, hop_s: float = 1e-3, rate: float = 1e8
) -> Cluster:
    codec = CodecFit(encode=encode, decode=NOTHING, merge=NOTHING)
    return Cluster(
        num_ranks=8,
        rate_bytes_per_s=rate,
        hop_s=hop_s,
        codecs={"dgc": codec, "topk": codec},
    )


def _groups(plan: Plan) -> list[list[str]]:
    return [[chunk.tensor for chunk in message.chunks] for message in plan.messages]


def test_cupcake_merges_where_starting_is_dear_and_not_where_it_is_free() -> None:
    profile = profile_of(*[([100_000], 0.01, 0.01)] * 4)
    dear = cupcake(profile, cluster_of(hop_s=0.5))
    assert _groups(dear) == [["t3", "t2", "t1", "t0"]]
    # the link is busy: start early
    slow = cupcake(profile, cluster_of(hop_s=0.0, rate=1e5))
    assert len(slow.messages) > 1
    encode = LineFit(alpha_s=1.0, per_unit_s=0.0)
    assert len(cupcake(profile, cluster_of(encode, hop_s=0.0)).messages) == 1


def _by_starts(profile: Profile, cluster: Cluster) -> list[list[str]]:
    """OMGS with every start computed again after every merge, tensors from 1 in forward
    order.
    """
    every, cost = arrivals(profile)[::-1], SparseCost.of(cluster, "dgc", 0.01)
    p = {i: one.tensor.numel for i, one in enumerate(every, 1)}
    t_b = {i: one.backward_s for i, one in enumerate(every, 1)}
    names = {i: [one.tensor.name] for i, one in enumerate(every, 1)}

    def starts() -> tuple[dict[int, float], dict[int, float]]:
        tau_s, tau_c, free, link = {}, {}, 0.0, 0.0
        for i in sorted(p, reverse=True):
            tau_s[i] = free + t_b[i]
            free = tau_s[i] + cost.encode_s(p[i])
            tau_c[i] = max(link, free)
            link = tau_c[i] + cost.gather_s(p[i])
        return tau_s, tau_c

    for i in range(len(every), 1, -1):
        tau_s, tau_c = starts()
        both = p[i] + p[i - 1]
        separate = [(cost.encode_s(n), cost.gather_s(n)) for n in (p[i], p[i - 1])]
        t_wait = (
            t_b[i - 1] + cost.encode_s(both) - sum(encode for encode, _ in separate)
        )
        t_wait -= tau_c[i] - (tau_s[i] + cost.encode_s(p[i]))
        if t_wait < sum(gather for _, gather in separate) - cost.gather_s(both):
            p[i - 1], t_b[i - 1] = both, t_b[i - 1] + t_b[i]
            names[i - 1] = names[i] + names[i - 1]
            del p[i], t_b[i], names[i]
    return [names[i] for i in sorted(names, reverse=True)]


@pytest.mark.smoke
@bounded(60)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 200_000), st.sampled_from((0.0, 0.001, 0.004, 0.03))),
        min_size=1,
        max_size=9,
    ),
    alpha_s=st.sampled_from((0.0, 1 / 1024, 1 / 128)),
    hop_s=st.sampled_from((0.0, 1 / 4096, 1 / 256)),
)
def test_omgs_merges_by_its_rule(
    rows: list[tuple[int, float]], alpha_s: float, hop_s: float
) -> None:
    profile = profile_of(*[([numel], 0.0, backward_s) for numel, backward_s in rows])
    cluster = cluster_of(LineFit(alpha_s=alpha_s, per_unit_s=1e-8), hop_s)
    assert _groups(omgs(profile, cluster)) == _by_starts(profile, cluster)
