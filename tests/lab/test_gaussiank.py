"""gaussiank: exact where gradients are normal, adjusted where they are not."""

from __future__ import annotations

import torch

from gradwire_lab.compress.gaussiank import gaussiank
from gradwire_lab.laws.densities import drawn
from tests.each import each


def num_sent(grad_N, **settings):
    payload, _ = gaussiank(**settings).encode(None, grad_N)
    return payload["indices"].numel()


@each("density", [0.1, 0.01, 0.001])
@each("scale", [1e-6, 1.0, 1e6])
def test_a_normal_gradient_is_cut_where_it_was_asked(density, scale):
    """Within four deviations of the draw, and the 8 bits that the threshold has."""
    asked = density * 200_000
    taken = num_sent(drawn("normal", 200_000) * scale, density=density)
    assert abs(taken / asked - 1) < 4 / asked**0.5 + 0.03


def test_a_threshold_that_lets_too_many_pass_is_raised():
    """Of Laplace's distribution 2.6 % lie beyond a normal's 1 %: too many. 1.5 times it is too few.

    Halved that is too many again; the fourth, at 1.7 %, is the nearest.
    """
    assert 1.6 < num_sent(drawn("laplace", 100_000), density=0.01) / 1_000 < 1.75


def test_beyond_the_cap_the_largest_are_sent():
    grad_N = torch.ones(1_000)
    grad_N[::100] = 2.0
    payload, _ = gaussiank(density=0.01, cap=3.0).encode(None, grad_N)
    assert set(range(0, 1_000, 100)) <= set(payload["indices"].tolist())
    assert payload["indices"].numel() <= 30
