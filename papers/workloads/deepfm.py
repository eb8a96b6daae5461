"""DeepFM: a factorisation machine and a perceptron over the same embeddings of
categorical fields.

Source: Guo et al., IJCAI 2017, "DeepFM", section 2: ZEN's recommendation application,
    nearly all of whose parameters are embeddings.
Differences: no dropout; all fields lie in one table, each from its own first row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from .perceptron import perceptron


class DeepFM(nn.Module):
    """Categories (B, F), field f's in [0, ``field_sizes[f]``), to a logit (B,) of a
    click.

    >>> DeepFM([3, 4], embedding=2)(torch.tensor([[0, 3], [2, 0]])).shape
    torch.Size([2])
    """

    starts_F: Tensor

    def __init__(
        self,
        field_sizes: Sequence[int],
        embedding: int = 16,
        layers: tuple[int, ...] = (64, 64),
    ) -> None:
        super().__init__()
        num_rows = sum(field_sizes)
        self.table = nn.Embedding(num_rows, embedding)
        self.weights = nn.Embedding(num_rows, 1)
        starts = [0, *accumulate(field_sizes)][:-1]
        self.register_buffer("starts_F", torch.tensor(starts), persistent=False)
        self.layers = perceptron((len(field_sizes) * embedding, *layers))
        self.logit = nn.Linear(layers[-1], 1)
        nn.init.normal_(self.table.weight, std=0.01)
        nn.init.zeros_(self.weights.weight)

    def forward(self, categories_BF: Tensor) -> Tensor:
        rows_BF = categories_BF + self.starts_F
        vectors_BFE = self.table(rows_BF)
        first_B = self.weights(rows_BF).sum(dim=(1, 2))
        # All pairs' products at once: half of (square of the sum less the sum of
        # squares).
        sum_BE = vectors_BFE.sum(1)
        squares_BE = vectors_BFE.square().sum(1)
        pairs_B = 0.5 * (sum_BE.square() - squares_BE).sum(1)
        deep_B1 = self.logit(self.layers(vectors_BFE.flatten(1)))
        logits_B: Tensor = first_B + pairs_B + deep_B1.squeeze(1)
        return logits_B
