"""The counter behind the catalogue: closed forms on small models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from scripts.catalogue.roofline import BYTE_RATE, FLOP_RATE, WINOGRAD, layers_of
from tests.each import each


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.dense = nn.Linear(32, 32)
        self.out = nn.Linear(32, 100, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(functional.relu(self.dense(self.embed(ids))))


def ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def test_tied_weights_are_listed_once_and_a_look_up_reads_only_its_rows() -> None:
    with torch.device("meta"):
        embed, dense = layers_of(Tied(), ids(4))
    assert embed.tensors == [("embed.weight", (100, 32))]
    assert [name for name, _ in dense.tensors] == ["dense.weight", "dense.bias"]
    assert embed.ideal_s == pytest.approx((4 * 8 + 2 * 4 * 32 * 4) / BYTE_RATE)


def test_a_large_product_is_bound_by_flops_and_a_small_one_by_bytes() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096, bias=False))
        (large,) = layers_of(model, torch.empty(8192, 4096))
        (small,) = layers_of(model, torch.empty(1, 4096))
    product_s = 2 * 8192 * 4096**2 / FLOP_RATE
    assert product_s < large.ideal_s < 1.05 * product_s
    weights_s = 4 * 4096**2 / BYTE_RATE
    assert weights_s < small.ideal_s < 1.01 * weights_s


@each("stride, share", [(1, 1 / WINOGRAD), (2, 1.0)])
def test_winograd_counts_for_stride_one_only(stride: int, share: float) -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(512, 512, 3, stride, 1, bias=False),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(512, 2),
        )
        conv, _ = layers_of(model, torch.empty(32, 512, 56, 56))
    flops = 2 * 32 * 512 * 512 * 9 * (56 // stride) ** 2
    assert share < conv.ideal_s / (flops / FLOP_RATE) < share + 0.05


def test_work_without_parameters_belongs_to_the_layer_before_it() -> None:
    def seconds(*extra: nn.Module) -> list[float]:
        model = nn.Sequential(nn.Linear(64, 64), *extra, nn.Linear(64, 64))
        return [layer.ideal_s for layer in layers_of(model, torch.empty(128, 64))]

    with torch.device("meta"):
        bare, with_relu = seconds(), seconds(nn.ReLU())
    assert with_relu[0] - bare[0] == pytest.approx(2 * 128 * 64 * 4 / BYTE_RATE)
    assert with_relu[1] == bare[1]


def test_a_parameter_that_the_forward_pass_never_reaches_is_named() -> None:
    model = Tied()
    model.spare = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"spare\.bias"):
        layers_of(model.to("meta"), ids(4))
