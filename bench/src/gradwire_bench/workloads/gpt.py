"""GPT: a causal transformer whose output layer is its embedding, as most language
models are.

Source: Radford et al. 2019 (GPT-2): layer norms first, tied embeddings, first values of
    deviation 0.02, those that end a residual branch less by the root of the number of
    branches; the reference for its training loop is nanoGPT
    (https://github.com/karpathy/nanoGPT).
Differences: no dropout, so that a step is a function of its batch.

Letters: B windows, T tokens of each, D width, H heads, V vocabulary.
"""

from torch import Tensor, nn
from torch.nn import functional


class GPT(nn.Module):
    """A model of tokens (B, T), T up to ``context``, to scores (B, T, V) of each next
    token.

    >>> import torch
    >>> model = GPT(context=8, width=16, num_layers=1, num_heads=2)
    >>> model(torch.zeros(2, 8).long()).shape
    torch.Size([2, 8, 256])
    """

    def __init__(
        self,
        context: int = 64,
        width: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
        vocabulary: int = 256,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(
            *(_Block(width, num_heads) for _ in range(num_layers))
        )
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocabulary, bias=False)
        self.scores.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                ends_a_branch = name.endswith(("merge.weight", "narrow.weight"))
                branches = 2 * num_layers if ends_a_branch else 1
                nn.init.normal_(parameter, std=0.02 / branches**0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTD = (
            self.embedding(tokens_BT) + self.places.weight[: tokens_BT.shape[1]]
        )
        scores_BTV: Tensor = self.scores(self.norm(self.blocks(hidden_BTD)))
        return scores_BTV


class _Block(nn.Module):
    """Attention, then a perceptron four times as wide, each added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.first_norm = nn.LayerNorm(width)
        self.second_norm = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        heads = self.attend(self.first_norm(hidden_BTD)).unflatten(
            -1, (3, self.num_heads, -1)
        )
        query_BHTE, key_BHTE, value_BHTE = heads.permute(2, 0, 3, 1, 4)
        seen_BHTE = functional.scaled_dot_product_attention(
            query_BHTE, key_BHTE, value_BHTE, is_causal=True
        )
        hidden_BTD = hidden_BTD + self.merge(seen_BHTE.transpose(1, 2).flatten(2))
        wide_BTE = functional.gelu(self.widen(self.second_norm(hidden_BTD)))
        out_BTD: Tensor = hidden_BTD + self.narrow(wide_BTE)
        return out_BTD
