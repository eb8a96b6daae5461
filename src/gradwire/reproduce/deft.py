"""deft: figures of DEFT on models for two cores, beside what the paper prints.

Source: Yoon and Oh, "DEFT: Exploiting Gradient Norm Difference between Model Layers for Scalable
    Gradient Sparsification" (ICPP 2023), sections 1 and 5.
Left out: figure 2, which shows no measurement.
"""

from __future__ import annotations

from ._deft_convergence import draw3, draw8, draw10, figure3, figure8, figure10
from ._deft_density import draw1, draw4, figure1, figure4
from ._deft_error import draw5, draw6, figure5, figure6
from ._deft_rows import POINTS
from ._deft_speed import draw7, draw9, figure7, figure9
from ._deft_training import draw_training, training
from ._frame import Figure, Reproduction

ASSUMPTIONS = (
    "Ranks are replicas in one process, driven as they would be between machines, but in figure 7, "
    "whose ranks are processes: 16 of them as in the paper, 8 with --quick; in figure 7, 8 and 4.",
    "Models are small and trainings short, for two cores: ResNet-18 of width 8 (with --quick 4, "
    "the paper's is 64) whose first convolution has stride 2, on Fashion-MNIST instead of "
    "CIFAR-10, an LSTM over 5,000 (1,000) words of Python's library and documentation instead of "
    "WikiText-2, NeuMF on MovieLens-100K instead of MovieLens-20M; 800 (40) steps instead of 30 to "
    "200 epochs. Data are drawn at random, one thread computes.",
    "Densities are the paper's: 0.01, 0.001 and 0.1. That of the recommender is not stated; 0.1003 "
    '"is approximate to" it, and 53.57 % are 5.31 times it.',
    "Every training has the same learning rates for all methods: up over the first 5 % of its "
    "steps, then down to 0 by a cosine. The paper's fall in steps, which figure 5a shows. SGD with "
    "momentum 0.9, but Adam for the recommender, which SGD does not move in so few steps.",
    "Residuals hold gradients, not gradients times the learning rate (algorithm 1, line 5), so "
    "errors (equation 2) are of gradients, and do not fall when a learning rate does.",
    "Density is that of the whole model, in one message. Top-k is exact, without a residual's "
    "correction of any kind beyond algorithm 1.",
)

UNPRINTED = frozenset({POINTS})

deft = Reproduction(
    paper="Yoon and Oh, DEFT (ICPP 2023)",
    assumptions=ASSUMPTIONS,
    figures=(
        Figure("figure1", "density of Top-k's mean over ranks", figure1, draw1, UNPRINTED),
        Figure("figure3", "scores of sparsifiers", figure3, draw3, UNPRINTED),
        Figure("figure4", "density of the mean by sparsifier", figure4, draw4, UNPRINTED),
        Figure("figure5", "error by sparsifier", figure5, draw5, UNPRINTED),
        Figure("figure6", "error at like densities of the mean", figure6, draw6, UNPRINTED),
        Figure("figure7", "where a step's time goes", figure7, draw7),
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
