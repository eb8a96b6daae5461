"""The layers of a perceptron, as the recommenders have them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def perceptron(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers from ``widths[0]`` to ``widths[-1]``, each followed by ReLU."""
    layers = nn.Sequential()
    for num_in, num_out in pairwise(widths):
        layers.append(nn.Linear(num_in, num_out)).append(nn.ReLU())
    return layers
