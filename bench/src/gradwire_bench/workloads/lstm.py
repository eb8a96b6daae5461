"""LSTM language model: embedding, LSTM layers, a softmax over the vocabulary.

Source: Hochreiter and Schmidhuber 1997; the usual word-level model of WikiText-2
    (Merity et al. 2016), DEFT's and ZEN's language application.
Differences: no dropout, so that a step is a function of its batch; hidden states begin
    at zero in every window, so that replicas hold nothing but parameters.
"""

from torch import Tensor, nn


class LSTMLM(nn.Module):
    """Tokens (B, T) to scores (B, T, vocabulary) of each next token.

    >>> import torch
    >>> model = LSTMLM(vocabulary=50, embedding=8, hidden=16)
    >>> model(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 5, 50])
    """

    def __init__(
        self,
        vocabulary: int = 10_000,
        embedding: int = 128,
        hidden: int = 256,
        num_layers: int = 1,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers, batch_first=True)
        self.scores = nn.Linear(hidden, vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.scores.bias)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTH, _ = self.lstm(self.embedding(tokens_BT))
        scores_BTV: Tensor = self.scores(hidden_BTH)
        return scores_BTV
