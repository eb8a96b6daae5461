"""Scalars of the whole gradient: samples of it, and its blocks' values combined."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradwire.contract import Layout
from gradwire.contract.spec import TensorSpec
from gradwire.dsl.language import (
    Vector,
    add,
    concat,
    extract,
    filter,
    greater,
    map,
    pick,
    reduce,
    sample,
    size,
    smaller,
    sort,
    uint1,
    whole,
)
from gradwire.dsl.program import Program
from gradwire.kernels.compiler import reference_only
from tests.each import each
from tests.strategies import bounded


@pytest.fixture(params=["interpreted", "compiled"], autouse=True)
def _served(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "compiled":
        yield
        return
    with reference_only():
        yield


class Summary(Program, layout=Layout.PACKED):
    """Sends scalars, and a bit an element so that there is something to decode."""

    def encode(self, gradient):
        raise NotImplementedError

    def decode(self, compressed):
        return map(extract(compressed)[-1], lambda bit: bit)


def bits(gradient: Vector) -> Vector:
    return map(gradient, lambda x: uint1(x > 0))


class everything(Summary):
    """What reductions of the whole gradient give, and one of what a first one gave."""

    def encode(self, gradient):
        mean = whole(reduce(gradient, add), add) / whole(size(gradient), add)
        above = filter(gradient, lambda x: x > mean)
        return concat(
            total=whole(reduce(gradient, add), add),
            least=whole(reduce(gradient, smaller), smaller),
            num_above=whole(size(above), add),
            product=whole(
                reduce(
                    map(gradient, lambda x: 1 + x / 4096), lambda a, b: a * b, start=1.0
                ),
                lambda a, b: a * b,
                start=1.0,
            ),
            bits=bits(gradient),
        )

    def decode(self, compressed):
        return map(extract(compressed)[-1], lambda bit: bit)


class quantiles(Summary):
    """Elements of a sample, at shares of it."""

    share: float = 0.05
    seed: int = 0

    def encode(self, gradient):
        drawn = sample(gradient, self.share, least=11)
        rising, falling = sort(drawn, smaller), sort(drawn, lambda a, b: greater(a, b))
        return concat(
            first=pick(rising, 0.0),
            fifth=pick(rising, 0.2),
            last=pick(rising, 1.0),
            first_falling=pick(falling, 0.0),
            fifth_falling=pick(falling, 0.2),
            bits=bits(gradient),
        )

    def decode(self, compressed):
        return map(extract(compressed)[-1], lambda bit: bit)


def normal(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


@each("numel", [1, 100, 5000])
def test_a_whole_gradient_is_reduced(numel):
    grad_N = normal(numel)
    payload, _ = everything(block=64).encode(None, grad_N)
    sums = torch.stack([part.double().sum().float() for part in grad_N.split(64)])
    total = sums.double().sum().float()
    assert payload["total"].item() == pytest.approx(total.item(), rel=1e-6)
    assert payload["least"].item() == grad_N.min()
    assert payload["num_above"].item() == int((grad_N > total / numel).sum())
    assert payload["product"].item() == pytest.approx(
        (1 + grad_N / 4096).prod().item(), rel=1e-4
    )


def test_more_blocks_are_combined_than_one_block_holds():
    grad_N = torch.ones(64 * 16384 + 1)
    grad_N[-1] = -5.0
    payload, _ = everything(block=64).encode(None, grad_N)
    assert payload["total"].item() == 64 * 16384 - 5
    assert payload["least"].item() == -5


def test_a_sample_is_drawn_from_all_and_picked_in_order():
    codec, grad_N = quantiles(), torch.arange(1000.0)
    state = codec.init(TensorSpec("gradient", 1000))
    payload, later = codec.encode(state, grad_N)
    low, fifth, high = (payload[name].item() for name in ("first", "fifth", "last"))
    assert low < fifth < high
    assert payload["first_falling"].item() == high
    assert payload["fifth_falling"].item() > fifth
    assert {low, fifth, high} <= set(range(1000))
    again, _ = codec.encode(later, grad_N)
    assert again["fifth"].item() != fifth or again["first"].item() != low
    with_residual, _ = codec.encode(state, grad_N - 1, residual_N=torch.ones(1000))
    assert torch.equal(with_residual["fifth"], payload["fifth"])


def test_stages_run_together_where_they_can():
    """Every pick of a sample, and every reduction that needs no other's result."""
    assert [len(stage.stages) for stage in quantiles().kernels().stages] == [5]
    made = everything().kernels().stages
    # total, size, least; then the others
    assert [len(stage.stages) for stage in made] == [
        3,
        2,
    ]


# ---- the whole gradient in order -----------------------------------------------------


class ordered(Summary):
    """Elements at thirds of the whole gradient: of distances from 1, and largest
    first.
    """

    def encode(self, gradient):
        near = sort(map(gradient, lambda x: abs(x - 1)), lambda a, b: a < b)
        falling = sort(gradient, lambda a, b: a > b)
        picked = {f"near{i}": pick(near, i / 3) for i in range(4)}
        picked |= {f"falling{i}": pick(falling, i / 3) for i in range(4)}
        return concat(**picked, bits=bits(gradient))

    def decode(self, compressed):
        return map(extract(compressed)[-1], lambda bit: bit)


FEW = st.lists(
    st.sampled_from(
        [0.0, 1.0, 2.0, 0.5, 1.5, -3.25, -3.5, 7.5, math.inf, -math.inf, math.nan]
    ),
    min_size=1,
    max_size=200,
)


@bounded(60)
@given(values=FEW)
def test_the_whole_gradient_is_sorted_and_nan_ranks_above_infinity(values):
    found, _ = ordered(block=64).encode(None, torch.tensor(values))
    near = torch.tensor(values).sub(1).abs().sort().values
    falling = torch.tensor(values).sort(descending=True).values
    for i in range(4):
        place = min(int(i / 3 * len(values)), len(values) - 1)
        for name, want in ((f"near{i}", near[place]), (f"falling{i}", falling[place])):
            assert found[name].item() == pytest.approx(want.item(), abs=0, nan_ok=True)
