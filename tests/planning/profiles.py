"""Profiles and clusters for tests of planners: drawn ones, and VGG16 from its definition."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.profile import Profile
from gradwire_lab.laws.inputs import MIXED, LayerRow, profile_of

TEN_GBIT = 1.25e9


_LINE = LineFit(alpha_s=2**-12, per_unit_s=2**-28)
CODECS = {
    name: CodecFit(encode=_LINE, decode=_LINE, merge=_LINE)
    for name in ("dgc", "onebit", "powersgd", "topk")
}
"""Costs of the compressors that planners take by default, or that their examples name."""


def exact_cluster(num_ranks: int = 2, hop_s: float = 2**-9, rate: float = 2.0**20) -> Cluster:
    """With powers of two every sum of times is exact, so closed forms can be compared by ==."""
    return Cluster(num_ranks=num_ranks, rate_bytes_per_s=rate, hop_s=hop_s)


def measured(cluster: Cluster) -> Cluster:
    """The same, with costs of compressors."""
    return cluster.model_copy(update={"codecs": CODECS})


seconds = st.one_of(st.just(0.0), st.floats(1e-6, 2e-2))


@st.composite
def profiles(draw: st.DrawFn, largest: int = 3000) -> Profile:
    """Up to seven layers, some without gradients, some of mixed dtypes, some that take no time.

    A tensor has up to ``largest`` elements.
    """
    numels = st.lists(st.integers(0, largest), max_size=3)
    rows = draw(st.lists(st.tuples(numels, seconds, seconds), min_size=1, max_size=7))
    return profile_of(*rows, dtypes=draw(st.sampled_from([MIXED, MIXED[:1], MIXED[1:]])))


hops = st.one_of(st.just(0.0), st.floats(1e-6, 1e-3))
lines = st.builds(LineFit, alpha_s=hops, per_unit_s=st.one_of(st.just(0.0), st.floats(1e-8, 1e-4)))
"""Measured costs, either of whose terms may be nothing."""

clusters = st.builds(
    Cluster,
    num_ranks=st.sampled_from((1, 2, 3, 8, 64)),
    rate_bytes_per_s=st.floats(1e4, 1e8),
    hop_s=hops,
    collectives=st.one_of(st.just({}), st.builds(dict, all_reduce=lines)),
    codecs=st.just(CODECS),
)


def random_instance(draw: random.Random, num_layers: int) -> tuple[Profile, Cluster, int]:
    """A profile, a cluster and a basic partition size, each spread over orders of magnitude."""
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


def vgg16(batch_size: int = 64, flop_per_s: float = 12e12) -> Profile:
    """VGG16 at 224 x 224: 2 flop a multiplication and addition, twice that for the backward."""
    channels, side = 3, 224
    sizes = []
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if not width:
            side //= 2
            continue
        weights = 9 * channels * width
        sizes.append((weights, width, weights * side * side))
        channels = width
    sizes += [(i * o, o, i * o) for i, o in ((25088, 4096), (4096, 4096), (4096, 1000))]
    per_mac_s = 2 * batch_size / flop_per_s
    rows = [
        ([weights, bias], macs * per_mac_s, 2 * macs * per_mac_s) for weights, bias, macs in sizes
    ]
    return profile_of(*rows, model="vgg16")


def deep(num_layers: int = 400) -> Profile:
    """Many layers of very different sizes."""
    draw = random.Random(0)
    rows = [
        (
            [draw.choice((1000, 10_000, 500_000, 3_000_000))],
            draw.random() / 1e3,
            draw.random() / 5e2,
        )
        for _ in range(num_layers)
    ]
    return profile_of(*rows, model="deep")
