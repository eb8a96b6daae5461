"""natural_compression: powers of two about each element, as near on average as the element is."""

from __future__ import annotations

import torch

import gradwire as gw
from tests.compress.quantisers import decoded, normal

natural = gw.compress.natural_compression


def test_what_is_sent_is_one_of_the_two_powers_about_an_element():
    grad_N = normal(4000)
    sent_N = decoded(natural(), grad_N)[0]
    below_N = 2.0 ** grad_N.abs().log2().floor()
    assert bool(((sent_N.abs() == below_N) | (sent_N.abs() == 2 * below_N)).all())
    assert torch.equal(sent_N.sign(), grad_N.sign())


def test_the_variance_is_at_most_an_eighth_of_the_square():
    grad_N = torch.logspace(-20, 20, 40_000)
    off_N = decoded(natural(), grad_N)[0] / grad_N - 1
    assert 0.05 < float(off_N.square().mean()) < 0.125  # 2^e (1 + f) has f (1 - f) / (1 + f)^2


def test_the_ends_of_the_range():
    least, most = 2.0**-126, 2.0**127
    grad_N = torch.tensor([least, least / 2, 0.0, most, 3.4e38, -torch.inf, torch.nan])
    sent_N = decoded(natural(), grad_N)[0]
    assert sent_N[:6].tolist() == [least, 0, 0, most, most, -torch.inf]
    assert not bool(sent_N[6].isfinite())
