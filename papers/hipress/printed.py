"""The numbers that HiPress prints of trainings, in its text and tables; shares are of
1.

Source: Wu et al., "HiPress" (IEEE TPDS 2023), sections 2, 6.2 and 6.3, tables 1 and 6.
"""

from __future__ import annotations

from typing import NamedTuple

BYTEPS = "BytePS"
RING = "Ring"
BYTEPS_ONEBIT = "BytePS(CompLL-onebit)"
BYTEPS_CPU = "BytePS(OSS-onebit)"
RING_DGC = "Ring(OSS-DGC)"
TORCH_POWERSGD = "PyTorch(OSS-PowerSGD)"
PS_ONEBIT = "HiPress-PS(onebit)"
RING_ONEBIT = "HiPress-Ring(onebit)"
HIPRESS_DGC = "HiPress-Ring(DGC)"
HIPRESS_TERNGRAD = "HiPress-PS(TernGrad)"
HIPRESS_POWERSGD = "HiPress-Ring(PowerSGD)"

CPU_SLOWER = 35.6
"""How many times as long onebit takes on a CPU as on a GPU (section 2.5)."""

TBQ_FASTER = 12.0
DGC_FASTER = 5.1
TERNGRAD_FASTER = (3400.0, 229.0)
"""How many times as fast CompLL's code is as open-source code (section 6.4): encodes of
TBQ (which takes 38.17 ms for 256 MB there) and DGC; encode and decode of TernGrad,
which runs on a CPU there.
"""

TABLE_1 = {
    ("transformer", RING): (0.47, 0.768),
    ("transformer", RING_DGC): (0.61, 0.703),
    ("bert_large", BYTEPS): (0.71, 0.636),
    ("bert_large", BYTEPS_ONEBIT): (0.76, 0.609),
}
"""Scaling efficiency and share of communication on 16 hosts."""

TABLE_6 = {
    "vgg19": (548.05, 392.0, 38),
    "resnet50": (97.46, 9.0, 155),
    "ugatit": (2558.75, 1024.0, 148),
    "ugatit_light": (511.25, 128.0, 148),
    "bert_base": (420.02, 89.42, 207),
    "bert_large": (1282.60, 119.23, 399),
    "lstm": (327.97, 190.42, 10),
    "transformer": (234.08, 65.84, 185),
}
"""Mebibytes of all gradients and of the largest, and their number."""


class Stated(NamedTuple):
    """A printed gain of one system over another."""

    model: str
    ours: str
    other: str
    gain: float
    is_most: bool
    """Whether it is the most that is gained on any number of hosts, else that on the
    most hosts.
    """
    place: str


FIGURE_9 = (
    Stated("vgg19", PS_ONEBIT, BYTEPS, 1.105, False, "figure 9a"),
    Stated("vgg19", PS_ONEBIT, RING, 0.604, False, "figure 9a"),
    Stated("vgg19", PS_ONEBIT, BYTEPS_ONEBIT, 0.695, False, "figure 9a"),
    Stated("vgg19", RING, BYTEPS, 0.503, True, "figure 9a"),
    Stated("bert_large", PS_ONEBIT, BYTEPS, 0.323, False, "figure 9d"),
    Stated("bert_large", PS_ONEBIT, RING, 0.441, False, "figure 9d"),
    Stated("bert_large", PS_ONEBIT, BYTEPS_ONEBIT, 0.233, False, "figure 9d"),
    Stated("bert_large", BYTEPS, RING, 0.089, True, "figure 9d"),
    Stated("transformer", RING, BYTEPS, 0.309, True, "figure 9e"),
    Stated("transformer", RING_DGC, BYTEPS, 0.428, True, "figure 9e"),
    Stated("transformer", RING_DGC, RING, 0.221, True, "figure 9e"),
    Stated("transformer", HIPRESS_DGC, RING_DGC, 0.411, True, "figure 9e"),
    Stated("transformer", HIPRESS_DGC, BYTEPS, 1.014, True, "figure 9e"),
    Stated("resnet50", HIPRESS_DGC, BYTEPS, 0.207, True, "figure 9b"),
    Stated("ugatit", HIPRESS_TERNGRAD, BYTEPS, 1.1, True, "figure 9c"),
    Stated("ugatit", TORCH_POWERSGD, RING, 0.233, True, "figure 9c"),
    Stated("ugatit", HIPRESS_POWERSGD, TORCH_POWERSGD, 0.393, True, "figure 9c"),
    Stated("lstm", HIPRESS_TERNGRAD, BYTEPS, 1.1, True, "figure 9f"),
    Stated("lstm", TORCH_POWERSGD, RING, 0.116, True, "figure 9f"),
    Stated("lstm", HIPRESS_POWERSGD, TORCH_POWERSGD, 0.227, True, "figure 9f"),
)
"""Figure 9 and section 6.2.1. What is up to 2.1 times "BytePS and Ring" stands over
BytePS here.
"""

FIGURE_11 = (
    Stated("vgg19", PS_ONEBIT, BYTEPS, 1.331, False, "section 6.3"),
    Stated("vgg19", PS_ONEBIT, BYTEPS_ONEBIT, 0.533, True, "section 6.2.2"),
    Stated("bert_base", RING_ONEBIT, RING, 0.286, False, "section 6.3"),
    Stated("vgg19", RING, BYTEPS_ONEBIT, 0.085, True, "section 6.2.2"),
)
"""Figure 11 and what sections 6.2.2 and 6.3 say of the same trainings."""

TERNGRAD_LOSS = {4: 0.128, 8: 0.236}
DGC_LOSS = {0.01: 0.067, 0.05: 0.113}
"""Figure 15b: by how much less speed more bits than 2, and more elements than 0.1 %,
leave.
"""

FIGURE_13C = {"terngrad": 0.947, "tbq": 0.368, "dgc": 0.426}
"""The share of synchronisation that CompLL's code saves in training VGG19."""
MOST_SPEEDUP = 13.4
"""The most that training is faster with CompLL's code (section 6.4)."""

FIGURE_16_TIME = 0.286
"""By how much less time HiPress converges, at most."""
