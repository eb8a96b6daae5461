"""fp8: the precision and range of e4m3, within each block's own scale."""

from __future__ import annotations

import math

import pytest
import torch

import gradwire as gw
from tests.compress.quantisers import decoded, normal

fp8, int8 = gw.compress.fp8, gw.compress.int8


def test_four_bits_of_precision_down_to_a_28672th_of_the_largest():
    """Three bits of fraction: half a last place is 1/16 of the number below; 448 / 2^-6 = 28672."""
    grad_N = torch.logspace(0, math.log10(28672), 1000).flip(0)
    sent_N = decoded(fp8(), grad_N)[0]
    assert float((sent_N / grad_N - 1).abs().max()) <= 1 / 16 + 1e-6
    assert sent_N[0] == pytest.approx(28672)


def test_small_elements_beside_a_large_one_survive_as_in_no_int8():
    grad_N = torch.cat([torch.tensor([1000.0]), normal(4000)])
    assert float((decoded(int8(), grad_N)[0] != 0).float().mean()) < 0.01
    assert float((decoded(fp8(), grad_N)[0] != 0).float().mean()) > 0.99
