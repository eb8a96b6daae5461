"""The numbers that SSFusion prints, in its text and tables, each with its place.

Source: Ming et al., SSFusion, sections III and V. Shares are of 1: 0.287 is 28.7 %.
"""

from __future__ import annotations

Range = tuple[float, float]
"""The least and the largest of several figures."""

TABLE_2 = {
    "resnet152": (0.7238, 0.0237),
    "vit_large": (0.6276, 0.0011),
    "bert_large": (0.6266, 0.0010),
    "gpt2_large": (0.6651, 0.0008),
}
"""The share of the tensors that are small, and their share of the size."""
SMALL_NUMEL = 102_400
"""The most elements of a small tensor (section III-B)."""

TABLE_3_KB = (10, 100, 1000, 10_000)
TABLE_3_GPU_S = (0.85e-3, 0.89e-3, 1.06e-3, 1.82e-3)
TABLE_3_CPU_S = (1.49e-3, 1.81e-3, 3.22e-3, 8.74e-3)
"""Seconds of DGC's selection by size."""
KB = 1024

TABLE_5 = {
    "resnet152": 0.0004,
    "vit_large": 0.0006,
    "bert_large": 0.0009,
    "gpt2_large": 0.0008,
}
"""Online profiling over the training's time."""

FIGURE_2: dict[str, tuple[float, float | None, float]] = {
    "resnet152": (0.241, 0.209, 0.017),
    "bert_large": (0.194, None, 0.026),
}
"""Sparsification over training time: tensor by tensor, at the degrees of 20 and of 100
%.
"""
FIGURE_5_S = {
    "resnet152": (0.60, 0.82),
    "bert_large": (0.75, 0.95),
    "gpt2_large": (0.81, 0.99),
}
"""Seconds of an iteration: selective and per-tensor sparsification."""

FIGURE_9_RANKS = (8, 64)
FIGURE_9_GATHER_S = ((1.24, 12.02), (2.96, 28.09))
FIGURE_9_REDUCE_S = ((0.15, 0.35), (0.52, 0.91))
"""Seconds for two models that are not named, on the fewest and the most GPUs."""

HIPRESS = "HiPress"
ESPRESSO = "Espresso"
OKTOPK = "Ok-Topk"
SPARDL = "SparDL"
OMGS = "OMGS"
CUPCAKE = "Cupcake"
BASELINES = (HIPRESS, ESPRESSO, OKTOPK, SPARDL, OMGS, CUPCAKE)
"""The schemes that every experiment compares."""

FIGURE_11: dict[str, Range] = {
    "resnet152": (0.287, 0.742),
    "vit_large": (0.358, 0.895),
    "bert_large": (0.291, 1.067),
    "gpt2_large": (0.275, 0.841),
}
"""Throughput of SSFusion-(O+I) over all others', by model."""
FIGURE_11_OVER: tuple[tuple[str, tuple[str, ...], Range], ...] = (
    ("oi", (HIPRESS,), (0.669, 1.067)),
    ("o", (HIPRESS,), (0.226, 0.401)),
    ("naive", (HIPRESS,), (0.148, 0.262)),
    ("oi", (OKTOPK, SPARDL), (0.517, 0.893)),
    ("oi", (ESPRESSO,), (0.415, 0.687)),
    ("o", (ESPRESSO,), (0.089, 0.214)),
    ("oi", (OMGS, CUPCAKE), (0.275, 0.654)),
)
"""A variant's throughput over that of some schemes, on all models."""
FIGURE_11_O: Range = (0.082, 0.127)
"""-O over naive."""
FIGURE_11_OI: Range = (0.545, 0.640)
"""-(O+I) over -O."""

FIGURE_13 = {
    HIPRESS: (0.617, 0.554),
    OKTOPK: (0.655, 0.578),
    SPARDL: (0.334, 0.400),
    ESPRESSO: (0.545, 0.473),
    OMGS: (0.425, 0.442),
    CUPCAKE: (0.330, 0.376),
}
"""By how much communication is less than others', for ResNet-152 and BERT-large."""
FIGURE_13_SELECTION = {HIPRESS: (0.419, 0.483)}
"""By how much sparsification is less."""

FIGURE_14: dict[str, dict[str, Range]] = {
    "resnet152": {
        "gaussiank": (0.265, 1.023),
        "dgc": (0.234, 0.817),
        "redsync": (0.226, 0.798),
        "sidco": (0.253, 0.839),
    },
    "bert_large": {
        "gaussiank": (0.288, 0.864),
        "dgc": (0.271, 0.871),
        "redsync": (0.246, 0.820),
        "sidco": (0.223, 0.846),
    },
}
"""Improvements by sparsifier; the text names them in this order before the numbers."""
FIGURE_15: dict[float, Range] = {
    0.1: (0.363, 0.701),
    0.05: (0.340, 0.820),
    0.01: (0.255, 0.985),
}
"""Improvements by density, ResNet-152."""
FIGURE_16: dict[int, Range] = {
    10: (0.315, 0.861),
    50: (0.227, 0.633),
    100: (0.255, 0.985),
}
"""Improvements by Gbit/s."""
FIGURE_17: dict[str, Range] = {"gpt2_xl": (0.475, 1.097), "bloom_3b": (0.536, 1.170)}
"""Improvements for two larger models on 64 GPUs of 80 GB."""

FIGURE_12_TIME: Range = (0.125, 0.741)
"""By how much less time SSFusion trains than others, on four models."""
FIGURE_12 = {
    "ResNet-152, top-1 accuracy": (73.6, 72.3, 62.1, 67.5, 68.3, 68.1),
    "VGG-19, top-1 accuracy": (70.0, 67.1, 54.3, 61.2, 60.2, 60.8),
    "LSTM, perplexity": (102.0, 106.0, 159.0, 121.0, 131.0, 130.0),
    "BERT-base, F1": (87.2, 86.5, 76.8, 79.8, 82.9, 80.5),
}
"""Final scores: dense, SSFusion, Ok-Topk, SparDL, OMGS, Cupcake."""
