"""An LSTM language model written here; BERT, GPT-2, BLOOM and ViT as transformers
defines them.

Token ids are (batch, length) int64; what comes out is (batch, length, vocabulary), and
for classifiers (batch, num_labels). Images are (batch, 3, height, width) float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradwire.errors import NotInstalled


class LSTM(nn.Module):
    """Two LSTM layers over WikiText-2's vocabulary, input and output embedding tied.

    Source: table 6 of HiPress ("LSTM": 327.97 MB, largest gradient 190.42 MB, 10
        gradients), which
    is this model: 33,278 words, 1,500 units, ``2 * 4 + 1`` gradients and the bias of
        the output.
    """

    def __init__(
        self, num_words: int = 33_278, width: int = 1_500, num_layers: int = 2
    ) -> None:
        super().__init__()
        self.encoder = nn.Embedding(num_words, width)
        self.rnns = nn.ModuleList(
            nn.LSTM(width, width, batch_first=True) for _ in range(num_layers)
        )
        self.dropout = nn.Dropout(0.65)
        self.decoder = nn.Linear(width, num_words)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids: Tensor) -> Tensor:
        out = self.dropout(self.encoder(ids))
        for rnn in self.rnns:
            out = self.dropout(rnn(out)[0])
        return self.decoder(out)


class _Transformer(nn.Module):
    """One of transformers' models, returning the scores by themselves.

    The mask to be added to the attention scores is given: to make one, transformers
    looks at values, and tensors on the meta device have none.
    """

    def __init__(self, model: nn.Module, scores: str) -> None:
        super().__init__()
        self.model = model
        self.scores = scores

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        mask = torch.zeros((batch, 1, length, length), device=ids.device)
        out = self.model(input_ids=ids, attention_mask=mask)
        return getattr(out, self.scores)


class _Scores(nn.Module):
    """One of transformers' models that need no mask, returning the scores by
    themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs).logits


def _definitions() -> Any:
    try:
        import transformers
    except ModuleNotFoundError:
        raise NotInstalled(
            "a table of BERT, GPT-2, BLOOM or ViT", "transformers", "catalogue"
        ) from None
    return transformers


def bert_base() -> nn.Module:
    """BERT-base, uncased, with a classifier of two labels (IMDb)."""
    its = _definitions()
    config = its.BertConfig(num_labels=2, attn_implementation="eager")
    return _Transformer(its.BertForSequenceClassification(config), "logits")


def bert_large() -> nn.Module:
    """BERT-large, uncased, with both heads of pre-training."""
    its = _definitions()
    config = its.BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
    )
    return _Transformer(its.BertForPreTraining(config), "prediction_logits")


def gpt2() -> nn.Module:
    """GPT-2 small (12 layers, 768 units), output embedding tied to the input's."""
    its = _definitions()
    config = its.GPT2Config(use_cache=False, attn_implementation="eager")
    return _Transformer(its.GPT2LMHeadModel(config), "logits")


def gpt2_large() -> nn.Module:
    """GPT-2 large (36 layers, 1280 units), output embedding tied to the input's."""
    return _gpt2(width=1280, num_layers=36, num_heads=20)


def gpt2_xl() -> nn.Module:
    """GPT-2 XL (48 layers, 1600 units), output embedding tied to the input's."""
    return _gpt2(width=1600, num_layers=48, num_heads=25)


def _gpt2(*, width: int, num_layers: int, num_heads: int) -> nn.Module:
    its = _definitions()
    config = its.GPT2Config(
        n_embd=width,
        n_layer=num_layers,
        n_head=num_heads,
        use_cache=False,
        attn_implementation="eager",
    )
    return _Transformer(its.GPT2LMHeadModel(config), "logits")


def bloom_3b() -> nn.Module:
    """BLOOM-3B (30 layers, 2560 units), output embedding tied to the input's."""
    its = _definitions()
    config = its.BloomConfig(
        vocab_size=250_880,
        hidden_size=2560,
        n_layer=30,
        n_head=32,
        use_cache=False,
        attn_implementation="eager",
    )
    return _Scores(its.BloomForCausalLM(config))


def vit_large() -> nn.Module:
    """ViT-L/16 at 224 x 224 with a head of 1000 classes."""
    its = _definitions()
    config = its.ViTConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        num_labels=1000,
        attn_implementation="eager",
    )
    return _Scores(its.ViTForImageClassification(config))
