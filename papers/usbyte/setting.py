"""US-Byte's setting: its clusters, its models, and the figures that are printed of
them.

Source: Gao et al., US-Byte, tables 2 and 3, figure 9, equation 14, sections 6.2 to 6.7.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from gradwire.planning import catalogue
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.profile import Layer, Profile

MODELS = ("googlenet", "resnet50", "vgg16", "mobilenet_v2", "inception_v3", "bert_base")
"""Table 3, in its order."""
BENCHMARKS = ("resnet50", "vgg16", "bert_base")
"""Figure 18's "three benchmark models": the text names ResNet-50; the others are
assumed.
"""

RANKS = 8
A_1_S = 910.5e-6
B_1_S_PER_BYTE = 0.352e-10
"""Figure 9a: a and b of cluster 1, 8 nodes of one V100 at 10 Gbit/s."""
A_2_S = 1318.6e-6
B_2_S_PER_BYTE = 2.406e-10
"""Figure 9b: a and b of cluster 2, 8 nodes of one RTX 3090 at 100 Gbit/s."""
RATE_1 = 1.25e9
RATE_2 = 12.5e9
"""Bytes a second of the clusters' links (table 2)."""
MBIT = 125_000
"""Bytes in the paper's "Mb", read as a megabit."""
A_BY_DOUBLING_S = (556.6e-6, 948.98e-6, 1318.6e-6)
"""a at 2, 4 and 8 ranks of cluster 2 as the published code lists them: near 381 us a
doubling, not 2(N-1) times anything. Its b at 2 ranks is 0.352e-10 s: the value that
figure 9a prints.
"""


def cluster_1(num_ranks: int) -> Cluster:
    """a scaled by equation 14 from 8 nodes, which is 65 us a hop; b from the link's
    rate.
    """
    return Cluster(num_ranks=num_ranks, rate_bytes_per_s=RATE_1)


def cluster_2() -> Cluster:
    """The 8 nodes of cluster 2: a as printed, b from the link's rate."""
    return Cluster(
        num_ranks=RANKS, rate_bytes_per_s=RATE_2, hop_s=A_2_S / (2 * (RANKS - 1))
    )


@cache
def profile_of(model: str, by_tensor: bool = False) -> Profile:
    """A profile of the catalogue; with ``by_tensor`` every tensor is a layer of its
    own.

    The layer's seconds go to its first tensor, which is the last one that is needed.
    """
    profile = catalogue.load(model)
    if not by_tensor:
        return profile
    return profile.model_copy(update={"layers": tuple(_split(profile.layers))})


def _split(layers: Iterable[Layer]) -> Iterable[Layer]:
    for layer in layers:
        if len(layer.tensors) < 2:
            yield layer
            continue
        for place, tensor in enumerate(layer.tensors):
            share = 1.0 if place == 0 else 0.0
            yield Layer(
                name=f"{layer.name}.{place}",
                tensors=(tensor,),
                forward_s=share * layer.forward_s,
                backward_s=share * layer.backward_s,
            )
