"""The Transformer of translation, base size: an encoder, a decoder, and one embedding
for all.

Source: Vaswani et al. 2017, table 3, base. Table 6 of HiPress ("Transformer": 234.08
MB, largest gradient 65.84 MB, 185 gradients) is this model with the 33,708 words of
TensorFlow's official one: no biases in attention, and a layer norm before each part and
behind the last. Token ids are (batch, length) int64, of the source and of the target
alike; what comes out is (batch, length, vocabulary).
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional

NUM_WORDS = 33_708


class Attention(nn.Module):
    """Attention of several heads, to the places of ``memory``."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        heads = (self.query(x), self.key(memory), self.value(memory))
        query, key, value = (
            one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in heads
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
        mixed = scores.softmax(-1) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer of the encoder, or with ``is_decoder`` one that attends to what that
    made, too.
    """

    def __init__(
        self, width: int, num_heads: int, hidden: int, *, is_decoder: bool
    ) -> None:
        super().__init__()
        num_attentions = 2 if is_decoder else 1
        self.attentions = nn.ModuleList(
            Attention(width, num_heads) for _ in range(num_attentions)
        )
        self.norms = nn.ModuleList(
            nn.LayerNorm(width) for _ in range(num_attentions + 1)
        )
        self.filter = nn.Linear(width, hidden)
        self.output = nn.Linear(hidden, width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        for place, attention in enumerate(self.attentions):
            own = self.norms[place](x)
            x = x + attention(own, memory if place and memory is not None else own)
        return x + self.output(functional.relu(self.filter(self.norms[-1](x))))


class Transformer(nn.Module):
    """Six layers of 512 units and 8 heads each way; the scores come from the
    embedding.
    """

    def __init__(
        self, width: int = 512, num_layers: int = 6, num_heads: int = 8
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, width)
        self.encoder, self.decoder = (
            nn.ModuleList(
                Block(width, num_heads, 4 * width, is_decoder=is_decoder)
                for _ in range(num_layers)
            )
            for is_decoder in (False, True)
        )
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder_norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.embedding(ids)
        for block in self.encoder:
            memory = block(memory)
        memory = self.encoder_norm(memory)
        x = self.embedding(ids)
        for block in self.decoder:
            x = block(x, memory)
        return functional.linear(self.decoder_norm(x), self.embedding.weight)
