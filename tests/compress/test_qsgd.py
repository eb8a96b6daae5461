"""qsgd: the bounds that Alistarh et al. 2017 prove, and the ends of float32's range."""

from __future__ import annotations

import math

import torch

import gradwire as gw
from tests.compress.quantisers import decoded, normal
from tests.each import each

qsgd = gw.compress.qsgd


@each("bitwidth, num_levels", [(2, 1), (4, 7), (8, 127)])
def test_variance_and_density_are_within_their_bounds(bitwidth, num_levels):
    """Lemma 3.1: E|Q - v|^2 <= min(n/s^2, sqrt(n)/s) |v|^2, and E|Q|_0 <= s (s + sqrt n)."""
    grad_N = normal(512)
    sent_SN = decoded(qsgd(bitwidth=bitwidth, norm="l2"), grad_N, 200)
    variance = float((sent_SN - grad_N).square().sum(1).mean() / grad_N.square().sum())
    assert variance <= min(512 / num_levels**2, math.sqrt(512) / num_levels) * 1.05
    num_sent = float((sent_SN != 0).float().sum(1).mean())
    assert num_sent <= num_levels * (num_levels + math.sqrt(512)) * 1.05


def test_levels_are_multiples_of_the_norm_with_a_sign():
    grad_N = torch.tensor([3.0, -4.0])
    levels = decoded(qsgd(bitwidth=4, norm="l2"), grad_N, 50) / (5 / 7)
    assert torch.allclose(levels, levels.round(), atol=1e-5)
    assert set(levels[:, 0].round().tolist()) == {4, 5}  # 3 / 5 * 7 = 4.2
    assert set(levels[:, 1].round().tolist()) == {-5, -6}


@each("size", [1e-36, 1e-25, 1e25, 3e38])
@each("norm", ["l2", "max"])
def test_a_norm_outside_float32_is_replaced_by_the_largest_magnitude(size, norm):
    grad_N = torch.tensor([size, -size, 0.0])
    sent_N = decoded(qsgd(norm=norm), grad_N)[0]
    assert torch.allclose(sent_N / size, grad_N / size, rtol=1e-5, atol=0)
