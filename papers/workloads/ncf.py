"""NeuMF: a factorisation and a perceptron over user and item embeddings, joined in one
logit.

Source: He et al., WWW 2017, "Neural Collaborative Filtering", section 3.4 (NeuMF):
    DEFT's recommendation application.
Differences: trained from first values that are drawn, without the separate pre-training
    of the two halves (section 3.4.1).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .perceptron import perceptron


class NeuMF(nn.Module):
    """Pairs (B, 2) of user and item to a logit (B,) of their interaction.

    ``factors`` is the width of the factorisation's embeddings; the perceptron's are
    ``layers[0] / 2`` wide and its layers as wide as ``layers`` says.

    >>> NeuMF(num_users=5, num_items=7)(torch.tensor([[4, 6], [0, 0]])).shape
    torch.Size([2])
    """

    def __init__(
        self,
        num_users: int,
        num_items: int,
        factors: int = 32,
        layers: tuple[int, ...] = (64, 32, 16),
    ) -> None:
        super().__init__()
        half = layers[0] // 2
        self.factor_users, self.factor_items = (
            nn.Embedding(num, factors) for num in (num_users, num_items)
        )
        self.layer_users, self.layer_items = (
            nn.Embedding(num, half) for num in (num_users, num_items)
        )
        self.layers = perceptron((2 * half, *layers[1:]))
        self.logit = nn.Linear(factors + layers[-1], 1)
        for table in (
            self.factor_users,
            self.factor_items,
            self.layer_users,
            self.layer_items,
        ):
            nn.init.normal_(table.weight, std=0.01)

    def forward(self, pairs_B2: Tensor) -> Tensor:
        users_B, items_B = pairs_B2.unbind(1)
        factors_BF = self.factor_users(users_B) * self.factor_items(items_B)
        both_BH = torch.cat(
            [self.layer_users(users_B), self.layer_items(items_B)], dim=1
        )
        logits_B1: Tensor = self.logit(
            torch.cat([factors_BF, self.layers(both_BH)], dim=1)
        )
        return logits_B1.squeeze(1)
