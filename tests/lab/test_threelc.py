"""threelc against the paper's definition, and what its runs of zeros come to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.contract.spec import TensorSpec
from gradwire_lab.compress.threelc import threelc
from gradwire_lab.laws.inputs import make_gradient
from tests.compress.quantisers import decoded
from tests.each import each


def quantised(grad_N: Tensor, sparsity: float) -> Tensor:
    """3LC's equations 1 to 3: M = s max|T|, round(T / M), times M; halves round to zero."""
    level = grad_N.abs().max() * sparsity
    return torch.where(level > 0, (grad_N / level).round(), 0.0) * level


@pytest.mark.smoke
@each("sparsity", [1.0, 1.5, 1.75, 1.9])
@each("kind", ["normal", "zeros", "equal", "ties", "spike", "tiny"])
def test_each_block_is_quantised_as_in_the_paper(kind, sparsity):
    grad_N = make_gradient(kind, 1000, torch.float32)
    want = [quantised(block, sparsity) for block in grad_N.split(192)]
    assert torch.equal(decoded(threelc(sparsity=sparsity, block=192), grad_N)[0], torch.cat(want))


def test_seventy_zeros_are_a_byte():
    """70 codes are 14 bytes of five; a group of 64 elements takes 13 bytes."""
    num_blocks = 4
    payload, _ = threelc(block=64 * 140).encode(None, torch.zeros(64 * 140 * num_blocks))
    assert payload["codes"].tolist() == [255] * (num_blocks * 140 * 13 // 14)


@each("block", [64, 128, 512, 16384])
def test_typical_lies_between_gradients_of_short_and_of_long_tails(block):
    spec, draw = TensorSpec("gradient", 100_000), torch.Generator().manual_seed(0)
    normal_N = torch.randn(100_000, generator=draw)
    sizes = []
    for grad_N in (normal_N, normal_N * normal_N.abs().exp()):
        residual_N = torch.zeros(100_000)
        for _ in range(10):
            order = torch.randperm(100_000, generator=draw)
            payload, _ = threelc(block=block).encode(None, grad_N[order], residual_N=residual_N)
        sizes.append(payload.size_bytes)
    assert sizes[1] < threelc(block=block).typical(spec).size_bytes < sizes[0]


@each("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_in_its_block_and_no_other(bad):
    grad_N = make_gradient("normal", 300, torch.float32)
    grad_N[100] = bad
    finite_N = decoded(threelc(block=64), grad_N)[0].isfinite()
    assert not finite_N[64:128].any()
    assert finite_N[:64].all()
    assert finite_N[128:].all()
