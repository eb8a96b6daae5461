"""sidco: fits that are right where gradients are what they assume, and how stages help."""

from __future__ import annotations

from math import log

import pytest
import torch

from gradwire_lab.compress._magnitudes import Magnitudes
from gradwire_lab.compress.sidco import sidco
from gradwire_lab.laws.densities import KINDS, drawn
from tests.each import each

NUMEL = 200_000


def num_sent(grad_N, **settings):
    payload, _ = sidco(**settings).encode(None, grad_N)
    return payload["indices"].numel()


def drawn_gamma(shape):
    """Magnitudes of a gamma distribution of a whole shape, with signs."""
    draw = torch.Generator().manual_seed(1)
    parts = -torch.rand(shape, NUMEL, generator=draw).clamp_min(1e-30).log()
    return parts.sum(0) * torch.randn(NUMEL, generator=draw).sign()


def one_stage(distribution, grad_N, density):
    """The threshold that the first fit gives."""
    codec, seen = sidco(density=density, distribution=distribution), Magnitudes.of(grad_N)
    return next(codec._ends(seen, round(density * NUMEL)))


@each("distribution", ["exponential", "gamma", "pareto"])
@each("density", [0.1, 0.01])
def test_one_stage_suffices_for_laplace(distribution, density):
    """Its magnitudes are exponential, which is a gamma of shape 1 and a Pareto of shape 0."""
    found = one_stage(distribution, drawn("laplace", NUMEL), density)
    assert found == pytest.approx(log(1 / density), rel=0.02)


def test_gamma_fits_magnitudes_of_another_shape_better():
    """At 1 % a gamma of shape 2 has its quantile at 6.638."""
    grad_N = drawn_gamma(2)
    by_gamma, by_exponential = (
        abs(one_stage(name, grad_N, 0.01) - 6.638) for name in ("gamma", "exponential")
    )
    assert by_gamma < by_exponential


@each("distribution", ["exponential", "gamma", "pareto"])
@each("kind", KINDS)
def test_stages_come_near_whatever_the_distribution(distribution, kind):
    grad_N = drawn(kind, NUMEL)
    for density in (0.1, 0.01, 0.001):
        taken = num_sent(grad_N, density=density, distribution=distribution)
        asked = min(density * NUMEL, int((grad_N != 0).sum()))
        assert 0.6 < taken / asked < 1.5
