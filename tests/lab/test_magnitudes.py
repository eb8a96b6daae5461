"""Magnitudes: what estimators read off a histogram is what the elements say."""

from __future__ import annotations

from math import inf

import pytest
import torch

from gradwire_lab.compress._magnitudes import Magnitudes
from gradwire_lab.compress.gaussiank import gaussiank
from gradwire_lab.compress.redsync import redsync
from gradwire_lab.compress.sidco import sidco
from gradwire_lab.laws.densities import KINDS, drawn


@pytest.mark.parametrize("kind", KINDS)
def test_moments_are_those_of_the_elements(kind):
    grad_N = drawn(kind, 30_000)
    seen, others_N = Magnitudes.of(grad_N), grad_N[grad_N != 0].double()
    assert (seen.numel, seen.num_elements) == (30_000, others_N.numel())
    assert seen.mean_log == pytest.approx(float(others_N.abs().log().mean()), abs=2e-3)
    assert seen.signed.mean == pytest.approx(float(others_N.mean()), abs=1e-3)
    assert seen.signed.variance == pytest.approx(float(others_N.var()), rel=5e-3)
    threshold = seen.edge_within(1.5, 1, 0, inf)
    beyond = others_N.abs()[others_N.abs() >= threshold]
    assert seen.above(threshold).mean == pytest.approx(float(beyond.mean()) - threshold, rel=1e-2)
    assert seen.above(threshold).variance == pytest.approx(float(beyond.var()), rel=1e-2)


@pytest.mark.parametrize("threshold", [1e-9, 0.1, 1.0, 2.5, 1e9])
def test_what_reaches_an_edge_is_counted_exactly(threshold):
    grad_N = drawn("normal", 30_000)
    seen = Magnitudes.of(grad_N)
    edge = seen.edge_within(threshold, 1, 0, inf)
    assert seen.num_reaching(threshold) == int((grad_N.abs() >= edge).sum()) > 0
    if 0.01 < threshold < 3:
        assert edge == pytest.approx(threshold, rel=2**-8)


def test_zeros_and_what_is_not_finite_are_only_counted():
    seen = Magnitudes.of(torch.tensor([0.0, -0.0, torch.inf, torch.nan, -2.0]))
    assert (seen.numel, seen.num_elements, seen.signed.mean) == (5, 1, -seen.largest)
    assert Magnitudes.of(torch.zeros(3)).num_elements == 0
    assert Magnitudes.of(torch.zeros(0)).numel == 0


@pytest.mark.parametrize("kind", [gaussiank, redsync, sidco])
def test_what_float32_would_round_up_to_an_edge_is_sent(kind):
    """Else it would wait for ever: the threshold is an edge that no element reaches."""
    grad_N = torch.full((1000,), 1 - 1e-12, dtype=torch.float64)
    payload, _ = kind(density=0.01).encode(None, grad_N)
    assert 10 <= payload["indices"].numel() <= 20


@pytest.mark.parametrize(
    ("threshold", "least", "most", "reached"),
    [
        (8.0, 100, 400, 100),  # the threshold's own
        (8.0, 101, 400, 250),
        (16.0, 100, 400, 250),  # 250 is 1.25 times what is asked, 100 half of it
        (16.0, 100, 249, 100),
        (16.0, 101, 249, 250),  # none is: too many, of which the largest are taken
        (0.5, 101, 249, 250),
    ],
)
def test_the_edge_that_is_nearest_to_what_is_asked(threshold, least, most, reached):
    counts = {16.0: 60, 8.0: 40, 4.0: 150, 2.0: 450, 1.0: 300}
    grad_N = torch.cat([torch.full((count,), -value) for value, count in counts.items()])
    edge = Magnitudes.of(grad_N).edge_within(threshold, 200, least, most)
    assert int((grad_N.abs() >= edge).sum()) == reached
