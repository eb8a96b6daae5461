"""sidco: fits that are right where gradients are what they assume, and how stages help."""

from __future__ import annotations

from math import log

import pytest

from gradwire_lab.compress._magnitudes import Magnitudes
from gradwire_lab.compress.sidco import sidco
from gradwire_lab.laws.densities import KINDS, drawn
from tests.each import each

NUMEL = 200_000


def num_sent(grad_N, **settings):
    payload, _ = sidco(**settings).encode(None, grad_N)
    return payload["indices"].numel()


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


@each("distribution", ["exponential", "gamma", "pareto"])
@each("kind", KINDS)
def test_stages_come_near_whatever_the_distribution(distribution, kind):
    grad_N = drawn(kind, NUMEL)
    for density in (0.1, 0.01, 0.001):
        taken = num_sent(grad_N, density=density, distribution=distribution)
        asked = min(density * NUMEL, int((grad_N != 0).sum()))
        assert 0.6 < taken / asked < 1.5
