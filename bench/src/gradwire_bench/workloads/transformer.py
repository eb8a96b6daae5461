"""A small causal transformer: the demo's language model, and a model of many like
layers.
"""

import torch
from torch import Tensor, nn


class CausalLM(nn.Module):
    """A model of tokens (B, context) to scores (B, context, vocabulary) of each next
    token.

    As it stands, over bytes, with 4 layers of width 256, it has 3.3 M parameters.
    """

    def __init__(
        self,
        context: int = 64,
        width: int = 256,
        num_layers: int = 4,
        vocabulary: int = 256,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocabulary)
        mask = torch.full((context, context), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTD = self.embedding(tokens_BT) + self.places
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD, src_mask=self.mask)
        scores_BTV: Tensor = self.scores(self.norm(hidden_BTD))
        return scores_BTV
