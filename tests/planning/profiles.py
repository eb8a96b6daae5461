"""Profiles and clusters for tests of planners: drawn ones, and VGG16 from its
definition.
"""

from __future__ import annotations

import random

from hypothesis import strategies as st

from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.profile import Profile
from gradwire_lab.laws.inputs import MIXED, LayerRow, profile_of

_LINE = LineFit(alpha_s=2**-12, per_unit_s=2**-28)
CODECS = {
    name: CodecFit(encode=_LINE, decode=_LINE, merge=_LINE)
    for name in ("dgc", "onebit", "powersgd", "topk")
}
"""Costs of the compressors that planners take by default, or that their examples
name.
"""


def exact_cluster(
    num_ranks: int = 2, hop_s: float = 2**-9, rate: float = 2.0**20
) -> Cluster:
    """With powers of two every sum of times is exact, so closed forms can be compared
    by ==.
    """
    return Cluster(num_ranks=num_ranks, rate_bytes_per_s=rate, hop_s=hop_s)


def measured(cluster: Cluster) -> Cluster:
    """The same, with costs of compressors."""
    return cluster.model_copy(update={"codecs": CODECS})


seconds = st.one_of(st.just(0.0), st.floats(1e-6, 2e-2))


@st.composite
def profiles(draw: st.DrawFn, largest: int = 3000) -> Profile:
    """Up to seven layers, some without gradients, some of mixed dtypes, some that take
    no time.

    A tensor has up to ``largest`` elements.
    """
    numels = st.lists(st.integers(0, largest), max_size=3)
    rows = draw(st.lists(st.tuples(numels, seconds, seconds), min_size=1, max_size=7))
    return profile_of(
        *rows, dtypes=draw(st.sampled_from([MIXED, MIXED[:1], MIXED[1:]]))
    )


hops = st.one_of(st.just(0.0), st.floats(1e-6, 1e-3))
lines = st.builds(
    LineFit, alpha_s=hops, per_unit_s=st.one_of(st.just(0.0), st.floats(1e-8, 1e-4))
)
"""Measured costs, either of whose terms may be nothing."""

clusters = st.builds(
    Cluster,
    num_ranks=st.sampled_from((1, 2, 3, 8, 64)),
    rate_bytes_per_s=st.floats(1e4, 1e8),
    hop_s=hops,
    collectives=st.one_of(st.just({}), st.builds(dict, all_reduce=lines)),
    codecs=st.just(CODECS),
)


def random_instance(
    draw: random.Random, num_layers: int
) -> tuple[Profile, Cluster, int]:
    """A profile, a cluster and a basic partition size, each spread over orders of
    magnitude.
    """
    rows: list[LayerRow] = [
        (
            [int(10 ** draw.uniform(3, 7))] if draw.random() > 0.1 else [],
            10 ** draw.uniform(-4, -1.5),
            10 ** draw.uniform(-4, -1.5),
        )
        for _ in range(num_layers)
    ]
    cluster = Cluster(
        num_ranks=draw.choice((2, 4, 8, 64)),
        rate_bytes_per_s=10 ** draw.uniform(7.5, 10),
        hop_s=10 ** draw.uniform(-5.5, -3.5),
        codecs=CODECS,
    )
    return profile_of(*rows), cluster, int(10 ** draw.uniform(4, 6.6))
