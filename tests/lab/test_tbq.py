"""tbq: the numbers its paper and its docstring promise."""

from __future__ import annotations

import math

import pytest
import torch

import gradwire as gw
from tests.compress.quantisers import assert_refused, decoded, normal

tbq = gw.compress.tbq


def test_an_element_becomes_zero_or_the_threshold_with_its_sign():
    grad_N = torch.tensor([0.5, 0.49, -0.5, 7.0, 0.0])
    assert decoded(tbq(threshold=0.5), grad_N)[0].tolist() == [0.5, 0, -0.5, 0.5, 0]


def test_code_i_lies_in_bits_2i_of_its_byte():
    payload, _ = tbq(threshold=1.0).encode(None, torch.tensor([1.0, -1.0, 0.0, math.nan, 2.0]))
    assert payload["codes"].tolist() == [0b11_00_10_01, 0b01]


@pytest.mark.parametrize(("numel", "size_bytes"), [(0, 0), (1, 1), (4, 1), (5, 2), (1000, 250)])
def test_two_bits_an_element(numel, size_bytes):
    payload, _ = tbq().encode(None, normal(numel))
    assert payload.size_bytes == size_bytes


def test_what_stays_below_the_threshold_adds_up_until_it_is_sent():
    """Strom 2015, section 3: the residual carries what was not sent."""
    codec, residual_N = tbq(threshold=1.0), torch.zeros(2)
    sent = []
    for _ in range(4):
        payload, _ = codec.encode(None, torch.tensor([0.25, 1.5]), residual_N=residual_N)
        sent.append(codec.decode(payload, torch.empty(2)).tolist())
    assert sent == [[0, 1], [0, 1], [0, 1], [1, 1]]
    assert residual_N.tolist() == [0, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_once_and_never_kept(bad):
    codec, residual_N = tbq(threshold=1.0), torch.tensor([0.5, 0.5])
    payload, _ = codec.encode(None, torch.tensor([bad, 0.75]), residual_N=residual_N)
    first, second = codec.decode(payload, torch.empty(2)).tolist()
    assert math.isnan(first)
    assert second == 1
    assert residual_N.tolist() == [0.5, 0.25]


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.nan, math.inf])
def test_the_threshold_is_a_finite_number_above_zero(threshold):
    assert_refused(tbq, "threshold", threshold, "a finite number above 0")


def test_a_threshold_is_a_number():
    assert_refused(tbq, "threshold", "0.1", "float")
