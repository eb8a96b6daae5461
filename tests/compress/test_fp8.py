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


def test_below_that_steps_are_even():
    grad_N = torch.tensor([448.0, 5 / 512, 0.4 / 512, 0.0])
    assert decoded(fp8(), grad_N)[0].tolist() == [448, 5 / 512, 0, 0]


def test_small_elements_beside_a_large_one_survive_as_in_no_int8():
    grad_N = torch.cat([torch.tensor([1000.0]), normal(4000)])
    assert float((decoded(int8(), grad_N)[0] != 0).float().mean()) < 0.01
    assert float((decoded(fp8(), grad_N)[0] != 0).float().mean()) > 0.99


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_spoils_its_own_block_only(bad):
    grad_N = torch.ones(128)
    grad_N[70] = bad
    sent_N = decoded(fp8(block=64), grad_N)[0]
    assert bool(sent_N[:64].isfinite().all())
    assert not bool(sent_N[70].isfinite())


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 3.4e38])
def test_no_magnitude_grows(size):
    sent_N = decoded(fp8(), torch.tensor([size, -size, 0.0]))[0]
    assert bool((sent_N.abs() <= size * (1 + 1e-6)).all())
    assert sent_N[2] == 0


@pytest.mark.parametrize(("numel", "size_bytes"), [(0, 0), (1, 5), (64, 68), (65, 73)])
def test_a_byte_an_element_and_four_a_block(numel, size_bytes):
    payload, _ = fp8(block=64).encode(None, normal(numel))
    assert payload.size_bytes == size_bytes
