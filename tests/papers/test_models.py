"""Models of the papers' experiments: shapes, sizes, and that what a model says of
itself is so.
"""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import nn

from gradwire_bench.workloads.convnet import ConvNet
from gradwire_bench.workloads.lstm import LSTMLM
from gradwire_bench.workloads.transformer import CausalLM
from papers.workloads.deepfm import DeepFM
from papers.workloads.ncf import NeuMF
from papers.workloads.resnet18 import ResNet18
from tests.each import each

pytestmark = pytest.mark.slow


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@each(
    "model, inputs, shape",
    [
        (ResNet18(4, channels=3, stem_stride=2), torch.zeros(2, 3, 32, 32), (2, 10)),
        (ConvNet(4), torch.zeros(3, 1, 28, 28), (3, 10)),
        (
            LSTMLM(30, 4, 8, num_layers=2),
            torch.zeros(2, 5, dtype=torch.long),
            (2, 5, 30),
        ),
        (
            CausalLM(6, 8, 1, vocabulary=30),
            torch.zeros(2, 6, dtype=torch.long),
            (2, 6, 30),
        ),
        (NeuMF(5, 7), torch.tensor([[4, 6], [0, 0], [1, 2]]), (3,)),
        (DeepFM([3, 4, 2]), torch.tensor([[0, 3, 1], [2, 0, 0]]), (2,)),
    ],
)
def test_models_give_outputs_of_their_shape_and_train_every_parameter(
    model: nn.Module, inputs: torch.Tensor, shape: tuple[int, ...]
) -> None:
    assert model(inputs).shape == shape
    model(inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_sizes_are_those_that_are_stated() -> None:
    assert size(ResNet18(64)) == pytest.approx(11.2e6, rel=0.01)
    assert size(ConvNet(16)) == pytest.approx(207e3, rel=0.01)
    assert size(CausalLM()) == pytest.approx(3.3e6, rel=0.01)


def test_language_models_look_at_no_later_token() -> None:
    tokens = torch.arange(6)[None]
    changed = tokens.clone()
    changed[0, 4] = 9
    for model in (LSTMLM(20, 4, 8), CausalLM(6, 8, 2, vocabulary=20)):
        before, after = model(tokens), model(changed)
        torch.testing.assert_close(before[:, :4], after[:, :4])
        assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_deepfm_adds_the_products_of_all_pairs() -> None:
    model = DeepFM([3, 4, 2], embedding=5)
    with torch.no_grad():
        nn.init.normal_(model.weights.weight)
        for parameter in model.logit.parameters():
            parameter.zero_()  # the perceptron is silent
    rows = torch.tensor([2, 3 + 1, 7 + 0])
    vectors = model.table(rows)
    pairs = sum(vectors[a] @ vectors[b] for a, b in combinations(range(3), 2))
    expected = model.weights(rows).sum() + pairs
    torch.testing.assert_close(model(torch.tensor([[2, 1, 0]]))[0], expected)
