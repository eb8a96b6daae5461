"""deft: figures of DEFT on models for two cores, beside what the paper prints.

Source: Yoon and Oh, "DEFT: Exploiting Gradient Norm Difference between Model Layers for
    Scalable Gradient Sparsification" (ICPP 2023), sections 1 and 5.
"""

from __future__ import annotations

from ..frame import MEASURED, Figure, Item, Reproduction
from ..rows import POINTS
from .convergence import draw3, draw8, draw10, figure3, figure8, figure10
from .cost import cost, draw_cost
from .density import draw1, draw4, figure1, figure4
from .error import draw5, draw6, figure5, figure6
from .speed import draw7, draw9, figure7, figure9
from .table import table1
from .training import draw_training, training

ASSUMPTIONS = (
    "Ranks are replicas in one process, driven as they would be between machines, but "
    "in figure 7 and for the cost of section 5.3, whose ranks are processes: 16 "
    "replicas as in the paper, 8 with --quick; 8 and 4 processes.",
    "Models are small and trainings short, for two cores: ResNet-18 of width 8 (with "
    "--quick 4, the paper's is 64) whose first convolution has stride 2, on "
    "Fashion-MNIST instead of CIFAR-10, an LSTM over 5,000 (1,000) words of Python's "
    "library and documentation instead of WikiText-2, NeuMF on MovieLens-100K instead "
    "of MovieLens-20M; 800 (40) steps instead of 30 to 200 epochs. Data are drawn at "
    "random, one thread computes.",
    "Densities are the paper's: 0.01, 0.001 and 0.1. That of the recommender is "
    "not stated; 0.1003 "
    '"is approximate to" it, and 53.57 % are 5.31 times it.',
    "Every training has the same learning rates for all methods: up over the first 5 % "
    "of its steps, then down to 0 by a cosine. The paper's fall in steps, which figure "
    "5a shows. SGD with momentum 0.9, but Adam for the recommender, which SGD does not "
    "move in so few steps.",
    "Residuals hold gradients, not gradients times the learning rate (algorithm "
    "1, line 5), so "
    "errors (equation 2) are of gradients, and do not fall when a learning rate does.",
    "Density is that of the whole model, in one message. Top-k is exact, without a "
    "residual's correction of any kind beyond algorithm 1.",
)

UNPRINTED = frozenset({POINTS})
TABLE_UNPRINTED = frozenset(
    {"asked_density", "local_density", "actual_density", "num_ranks"}
)
COST_UNPRINTED = frozenset({"method", "numel", "num_averaged", "interface_bytes"})

DRAWING = "an illustration: it states no figures"

CONTENTS = (
    Item(
        "figure 1",
        "density of Top-k's mean over ranks",
        ("figure1",),
        how=MEASURED,
    ),
    Item(
        "table 1",
        "strengths and weaknesses of sparsifiers, in words",
        ("table1",),
        how=MEASURED,
    ),
    Item("figure 2", "overview of DEFT", why=DRAWING),
    Item(
        "table 2",
        "models, data sets, batches and epochs",
        why="the setting of the others: the assumptions say what stands for it here",
    ),
    Item(
        "figure 3",
        "convergence of sparsifiers on 16 GPUs",
        ("figure3",),
        how=MEASURED,
    ),
    Item(
        "figure 4",
        "actual density by sparsifier",
        ("figure4",),
        how=MEASURED,
    ),
    Item(
        "figure 5",
        "error by sparsifier",
        ("figure5",),
        how=MEASURED,
    ),
    Item(
        "figure 6",
        "error at like densities of the mean",
        ("figure6",),
        how=MEASURED,
    ),
    Item(
        "figure 7",
        "where a step's time goes",
        ("figure7",),
        how=MEASURED,
    ),
    Item(
        "section 5.3",
        "the cost of communication, by a formula",
        ("cost",),
        how=MEASURED,
    ),
    Item(
        "figure 8",
        "convergence of DEFT by density",
        ("figure8",),
        how=MEASURED,
    ),
    Item(
        "figure 9",
        "speedup of DEFT's selection over ranks",
        ("figure9",),
        how=MEASURED,
    ),
    Item(
        "figure 10",
        "convergence of DEFT over ranks",
        ("figure10",),
        how=MEASURED,
    ),
    Item(
        "beyond the paper",
        "where more sparsifiers end, seed by seed",
        ("training",),
        how=MEASURED,
    ),
)

deft = Reproduction(
    paper="Yoon and Oh, DEFT (ICPP 2023)",
    assumptions=ASSUMPTIONS,
    contents=CONTENTS,
    figures=(
        Figure(
            "figure1", "density of Top-k's mean over ranks", figure1, draw1, UNPRINTED
        ),
        Figure("table1", "words for sparsifiers", table1, unprinted=TABLE_UNPRINTED),
        Figure("figure3", "scores of sparsifiers", figure3, draw3, UNPRINTED),
        Figure(
            "figure4", "density of the mean by sparsifier", figure4, draw4, UNPRINTED
        ),
        Figure("figure5", "error by sparsifier", figure5, draw5, UNPRINTED),
        Figure(
            "figure6", "error at like densities of the mean", figure6, draw6, UNPRINTED
        ),
        Figure("figure7", "where a step's time goes", figure7, draw7),
        Figure(
            "cost",
            "communication by section 5.3's formula",
            cost,
            draw_cost,
            COST_UNPRINTED,
        ),
        Figure("figure8", "scores of DEFT by density", figure8, draw8, UNPRINTED),
        Figure("figure9", "selection over ranks", figure9, draw9),
        Figure("figure10", "scores of DEFT over ranks", figure10, draw10, UNPRINTED),
        Figure(
            "training",
            "beyond the paper: where more sparsifiers end, seed by seed",
            training,
            draw_training,
            UNPRINTED,
        ),
    ),
)
