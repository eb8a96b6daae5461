"""tbq: the numbers its paper and its docstring promise."""

from __future__ import annotations

import math

import torch

import gradwire as gw
from tests.compress.quantisers import decoded, normal
from tests.each import each

tbq = gw.compress.tbq


def test_an_element_becomes_zero_or_the_threshold_with_its_sign():
    grad_N = torch.tensor([0.5, 0.49, -0.5, 7.0, 0.0])
    assert decoded(tbq(threshold=0.5), grad_N)[0].tolist() == [0.5, 0, -0.5, 0.5, 0]


def test_code_i_lies_in_bits_2i_of_its_byte():
    payload, _ = tbq(threshold=1.0).encode(None, torch.tensor([1.0, -1.0, 0.0, math.nan, 2.0]))
    assert payload["codes"].tolist() == [0b11_00_10_01, 0b01]


@each("numel, size_bytes", [(0, 0), (1, 1), (4, 1), (5, 2), (1000, 250)])
def test_two_bits_an_element(numel, size_bytes):
    payload, _ = tbq().encode(None, normal(numel))
    assert payload.size_bytes == size_bytes
