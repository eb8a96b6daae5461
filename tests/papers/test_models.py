"""Models of the papers' experiments: shapes, sizes, and that what a model says of itself is so."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradwire.errors import InvalidSetting
from gradwire_bench.workloads.convnet import ConvNet
from gradwire_bench.workloads.lstm import LSTMLM
from gradwire_bench.workloads.transformer import CausalLM
from papers.workloads.deepfm import DeepFM
from papers.workloads.ncf import NeuMF
from papers.workloads.resnet18 import ResNet18

pytestmark = pytest.mark.slow


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "inputs", "shape"),
    [
        (ResNet18(4), torch.zeros(2, 1, 28, 28), (2, 10)),
        (ResNet18(4, channels=3, stem_stride=2), torch.zeros(2, 3, 32, 32), (2, 10)),
        (ConvNet(4), torch.zeros(3, 1, 28, 28), (3, 10)),
        (LSTMLM(30, 4, 8, num_layers=2), torch.zeros(2, 5, dtype=torch.long), (2, 5, 30)),
        (CausalLM(6, 8, 1, vocabulary=30), torch.zeros(2, 6, dtype=torch.long), (2, 6, 30)),
        (NeuMF(5, 7), torch.tensor([[4, 6], [0, 0], [1, 2]]), (3,)),
        (DeepFM([3, 4, 2]), torch.tensor([[0, 3, 1], [2, 0, 0]]), (2,)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_shapes(model: nn.Module, inputs: torch.Tensor, shape: tuple[int, ...]) -> None:
    assert model(inputs).shape == shape
    model(inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_sizes_are_those_that_are_stated() -> None:
    assert size(ResNet18(64)) == pytest.approx(11.2e6, rel=0.01)
    assert size(ResNet18(16)) == pytest.approx(700e3, rel=0.01)
    assert size(ResNet18(8)) == pytest.approx(176e3, rel=0.01)
    assert size(ConvNet(16)) == pytest.approx(207e3, rel=0.01)
    assert size(CausalLM()) == pytest.approx(3.3e6, rel=0.01)


def test_resnet_has_eighteen_layers_with_weights() -> None:
    layers = [m for m in ResNet18(4).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    projections = [m for m in layers if isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1)]
    assert len(layers) - len(projections) == 18
    assert len(projections) == 3


def test_tied_weights_are_one_parameter() -> None:
    tied, untied = LSTMLM(50, 8, 8, tied=True), LSTMLM(50, 8, 8)
    assert tied.scores.weight is tied.embedding.weight
    assert size(untied) - size(tied) == 50 * 8
    with pytest.raises(InvalidSetting, match="embedding must be hidden, 16, where tied, got 8"):
        LSTMLM(50, 8, 16, tied=True)


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


def test_neumf_has_both_halves() -> None:
    model = NeuMF(4, 6, factors=3, layers=(4, 2))
    pairs = torch.tensor([[1, 5]])
    factors = model.factor_users.weight[1] * model.factor_items.weight[5]
    both = torch.cat([model.layer_users.weight[1], model.layer_items.weight[5]])
    linear = model.layers[0]
    assert isinstance(linear, nn.Linear)
    hidden = functional.relu(linear(both))
    torch.testing.assert_close(model(pairs)[0], model.logit(torch.cat([factors, hidden]))[0])
