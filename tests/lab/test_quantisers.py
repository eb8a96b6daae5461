"""tbq, natural_compression, threelc and adacomp against their papers' definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.contract.spec import TensorSpec
from gradwire_lab.compress.adacomp import adacomp
from gradwire_lab.compress.threelc import threelc
from gradwire_lab.laws.inputs import make_gradient
from tests.compress.test_quantisers import decoded, normal
from tests.each import each

tbq, natural = gw.compress.tbq, gw.compress.natural_compression


def test_an_element_of_tbq_becomes_zero_or_the_threshold_with_its_sign() -> None:
    grad_N = torch.tensor([0.5, 0.49, -0.5, 7.0, 0.0])
    assert decoded(tbq(threshold=0.5), grad_N)[0].tolist() == [0.5, 0, -0.5, 0.5, 0]
    payload, _ = tbq(threshold=1.0).encode(
        None, torch.tensor([1.0, -1.0, 0.0, math.nan, 2.0])
    )
    # code i in bits 2i of its byte
    assert payload["codes"].tolist() == [
        0b11_00_10_01,
        0b01,
    ]


def test_natural_compression_sends_one_of_the_two_powers_about_an_element() -> None:
    grad_N = normal(4000)
    sent_N = decoded(natural(), grad_N)[0]
    below_N = 2.0 ** grad_N.abs().log2().floor()
    assert bool(((sent_N.abs() == below_N) | (sent_N.abs() == 2 * below_N)).all())
    assert torch.equal(sent_N.sign(), grad_N.sign())
    grad_N = torch.logspace(-20, 20, 40_000)
    off_N = decoded(natural(), grad_N)[0] / grad_N - 1
    # 2^e (1 + f) has f (1 - f) / (1 + f)^2
    assert 0.05 < float(off_N.square().mean()) < 0.125
    least, most = 2.0**-126, 2.0**127
    grad_N = torch.tensor([least, least / 2, 0.0, most, 3.4e38, -torch.inf, torch.nan])
    sent_N = decoded(natural(), grad_N)[0]
    assert sent_N[:6].tolist() == [least, 0, 0, most, most, -torch.inf]
    assert not bool(sent_N[6].isfinite())


def quantised(grad_N: Tensor, sparsity: float) -> Tensor:
    """3LC's equations 1 to 3: M = s max|T|, round(T / M), times M; halves round to
    zero.
    """
    level = grad_N.abs().max() * sparsity
    return torch.where(level > 0, (grad_N / level).round(), 0.0) * level


@pytest.mark.smoke
@each("sparsity", [1.0, 1.75])
@each("kind", ["normal", "zeros", "ties", "tiny"])
def test_each_block_of_threelc_is_quantised_as_in_the_paper(
    kind: str, sparsity: float
) -> None:
    grad_N = make_gradient(kind, 1000, torch.float32)
    want = [quantised(block, sparsity) for block in grad_N.split(192)]
    assert torch.equal(
        decoded(threelc(sparsity=sparsity, block=192), grad_N)[0], torch.cat(want)
    )


def test_seventy_zeros_of_threelc_are_a_byte() -> None:
    """70 codes are 14 bytes of five; a group of 64 elements takes 13 bytes."""
    num_blocks = 4
    payload, _ = threelc(block=64 * 140).encode(
        None, torch.zeros(64 * 140 * num_blocks)
    )
    assert payload["codes"].tolist() == [255] * (num_blocks * 140 * 13 // 14)


@each("block", [64, 16384])
def test_typical_of_threelc_lies_between_short_and_long_tails(block: int) -> None:
    spec, draw = TensorSpec("gradient", 100_000), torch.Generator().manual_seed(0)
    normal_N = torch.randn(100_000, generator=draw)
    sizes = []
    for grad_N in (normal_N, normal_N * normal_N.abs().exp()):
        residual_N = torch.zeros(100_000)
        for _ in range(10):
            order = torch.randperm(100_000, generator=draw)
            payload, _ = threelc(block=block).encode(
                None, grad_N[order], residual_N=residual_N
            )
        sizes.append(payload.size_bytes)
    assert sizes[1] < threelc(block=block).typical(spec).size_bytes < sizes[0]


BIN = 64


def chosen(whole_N: Tensor, latest_N: Tensor) -> Tensor:
    """AdaComp's algorithm 2: G is ``whole_N``, dW ``latest_N``; 0 where nothing is
    sent.
    """
    bins = list(zip(whole_N.split(BIN), latest_N.split(BIN), strict=True))
    most = [float(g.abs().max()) for g, _ in bins]
    level = sum(most) / len(most)
    signs = [
        torch.where((g + d).abs() >= top, g.sign(), 0.0)
        for (g, d), top in zip(bins, most, strict=True)
    ]
    return torch.cat(signs) * torch.tensor(level, dtype=torch.float32)


@pytest.mark.smoke
@each("numel", [1, 63, 64, 65, 1000])
def test_every_step_of_adacomp_sends_what_the_paper_says(numel: int) -> None:
    codec, residual_N = adacomp(block=BIN), torch.zeros(numel)
    for step in range(5):
        grad_N = make_gradient("normal", numel, torch.float32, seed=step)
        whole_N = grad_N + residual_N
        payload, _ = codec.encode(None, grad_N, residual_N=residual_N)
        decoded_N = codec.decode(payload, torch.empty(numel))
        torch.testing.assert_close(
            decoded_N, chosen(whole_N, grad_N), rtol=2e-7, atol=0
        )
        assert torch.equal(residual_N, whole_N - decoded_N)
