"""SSFusion's setting: its clusters, its GPUs and its models, as the simulated figures
take them.

Source: Ming et al., SSFusion, section V-A and tables 3 and 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradwire.planning import catalogue
from gradwire.planning.data.cluster import Cluster, CodecFit, Host
from gradwire.planning.data.fit import LineFit, fit_line
from gradwire.planning.data.profile import Profile

from .printed import FIGURE_2, FIGURE_5_S, KB, TABLE_3_CPU_S, TABLE_3_GPU_S, TABLE_3_KB

GBIT = 1e9 / 8
DENSITY = 0.01
SPARSIFIER = "dgc"
MODELS = ("resnet152", "vit_large", "bert_large", "gpt2_large")
"""Figure 11's."""
RANKS = (16, 32, 64)
PCIE_GBIT = 256
"""PCIe Gen4, 16 lanes, within a node (section V-A)."""
HOP_S = 5e-6
"""Seconds of a hop between two GPUs over InfiniBand, however little it carries:
assumed.
"""
A100_SPEED = 2.2
"""How many times as fast an A100 computes as a profile's V100: assumed."""
ITEM_BYTES = 4
NUM_TENSORS = 467
"""ResNet-152's tensors."""


def _line(seconds: tuple[float, ...]) -> LineFit:
    sizes = [size_kb * KB // ITEM_BYTES for size_kb in TABLE_3_KB]
    return fit_line(zip(sizes, seconds, strict=True))


GPU = _line(TABLE_3_GPU_S)
CPU = _line(TABLE_3_CPU_S)
"""Table 3: DGC's selection over elements of 4 bytes."""
NOTHING = LineFit(alpha_s=0.0, per_unit_s=0.0)
WHOLE = ("oktopk", "spardl")
"""Exchanges that select from the whole gradient after the backward pass, on the GPU."""


@dataclass(frozen=True)
class Reading:
    """A cluster of GPUs, and how it is read where the paper leaves that open."""

    name: str
    rate_gbit: float
    gpu_speed: float
    slower: Mapping[str, float] = field(default_factory=dict)
    """How many times as long a sparsifier takes as DGC; 1 where it is not named."""
    gpus_per_node: int = 1
    """The GPUs that share a link, if rings have it for themselves and other verbs share
    it.
    """

    def cluster(self, num_ranks: int, *, on_gpu: bool = False) -> Cluster:
        """So many GPUs, each with a link of its own.

        Sparsifiers take the seconds of table 3: those of the GPU where they hold up the
        backward pass, those of the CPU beside it. With ``on_gpu`` a planner is told the
        GPU's for both. Merging and decoding take none, as none are printed.
        """
        names = {SPARSIFIER, *self.slower}
        beside = GPU if on_gpu else CPU
        codecs = {name: _times(beside, self.slower.get(name, 1.0)) for name in names}
        of_all = {
            name: _codec(_times(GPU, self.slower.get(name, 1.0))) for name in WHOLE
        }
        count = self.gpus_per_node
        rate = self.rate_gbit * GBIT
        return Cluster(
            num_ranks=num_ranks,
            rate_bytes_per_s=rate,
            hop_s=HOP_S,
            host=Host(num_ranks=count, rate_bytes_per_s=PCIE_GBIT * GBIT)
            if count > 1
            else None,
            codecs={**{name: _codec(line) for name, line in codecs.items()}, **of_all},
            inline={name: _times(GPU, self.slower.get(name, 1.0)) for name in names},
            source=f"SSFusion's testbed, read as: {self.name}",
        ).flat

    def profile(self, model: str) -> Profile:
        """A catalogued model on the testbed's GPU."""
        return faster(catalogue.load(model), self.gpu_speed)


def _times(line: LineFit, factor: float) -> LineFit:
    return LineFit(alpha_s=factor * line.alpha_s, per_unit_s=factor * line.per_unit_s)


def _codec(line: LineFit) -> CodecFit:
    return CodecFit(encode=line, decode=NOTHING, merge=NOTHING)


def faster(profile: Profile, speed: float) -> Profile:
    """The profile on a device that computes ``speed`` times as fast."""
    layers = tuple(
        one.model_copy(
            update={
                "forward_s": one.forward_s / speed,
                "backward_s": one.backward_s / speed,
            }
        )
        for one in profile.layers
    )
    return profile.model_copy(update={"layers": layers})


CLOUD = Reading("links of 200 Gbit/s", 200, A100_SPEED)
"""16 nodes of 4 A100 (section V-A): the reading we stand by."""
MEASURED_GBIT = 56
"""Gbit/s that arrive in figure 9, if its models are BERT-large and GPT2-large: see
there.
"""
AS_FIGURE_9 = Reading("56 Gbit/s arrive, as in figure 9", MEASURED_GBIT, A100_SPEED)
PER_TENSOR_S = FIGURE_2["resnet152"][0] * FIGURE_5_S["resnet152"][1] / NUM_TENSORS
"""Seconds of a selection that figures 2 and 5 leave for each of ResNet-152's
tensors.
"""
AS_FIGURE_2 = Reading(
    "selection as long as in figure 2",
    CLOUD.rate_gbit,
    A100_SPEED,
    dict.fromkeys((SPARSIFIER, *WHOLE), PER_TENSOR_S / GPU.alpha_s),
)
AS_NODES = Reading(
    "nodes of 4 GPUs share links of 200 Gbit/s", 200, A100_SPEED, gpus_per_node=4
)
"""Nothing is added up within a node first, as selections differ from GPU to GPU."""
LOCAL = Reading("links of 100 Gbit/s", 100, 1.0)
"""8 nodes of one V100S (section V-A), taken as the profiles' V100."""
LOCAL_RANKS = 8
