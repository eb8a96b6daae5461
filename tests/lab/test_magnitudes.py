"""Magnitudes: what estimators read off a histogram is what the elements say."""

from __future__ import annotations

from math import inf

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradwire.kernels.libraries import reference_only
from gradwire_lab.compress import _magnitudes
from gradwire_lab.compress._magnitudes import Magnitudes
from gradwire_lab.laws.densities import KINDS, drawn
from tests.each import each
from tests.kernels.vectors import cases, compiled, residual_for, same_bits, vector

__all__ = ["compiled"]


@each("kind", KINDS)
def test_moments_are_those_of_the_elements(kind):
    grad_N = drawn(kind, 30_000)
    seen, others_N = Magnitudes.of(grad_N), grad_N[grad_N != 0].double()
    assert (seen.numel, seen.num_elements) == (30_000, others_N.numel())
    assert seen.mean_log == pytest.approx(float(others_N.abs().log().mean()), abs=2e-3)
    assert seen.signed.mean == pytest.approx(float(others_N.mean()), abs=1e-3)
    assert seen.signed.variance == pytest.approx(float(others_N.var()), rel=5e-3)
    threshold = seen.edge_within(1.5, 1, 0, inf)
    beyond = others_N.abs()[others_N.abs() >= threshold]
    assert seen.above(threshold).mean == pytest.approx(
        float(beyond.mean()) - threshold, rel=1e-2
    )
    assert seen.above(threshold).variance == pytest.approx(
        float(beyond.var()), rel=1e-2
    )


@each(
    "threshold, least, most, reached",
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
    grad_N = torch.cat(
        [torch.full((count,), -value) for value, count in counts.items()]
    )
    edge = Magnitudes.of(grad_N).edge_within(threshold, 200, least, most)
    assert int((grad_N.abs() >= edge).sum()) == reached


def histogram(x_N, residual_N=None):
    after_N = None if residual_N is None else residual_N.clone()
    found = _magnitudes.histogram(x_N, after_N)
    return [*found, after_N][: 2 + (residual_N is not None)]


@pytest.mark.smoke
@pytest.mark.usefixtures("compiled")
@settings(max_examples=20, deadline=None, derandomize=True)
@example(case=(200_003, "not finite", 1), with_residual=True)
@given(case=cases, with_residual=st.booleans())
def test_cpp_histogram_is_the_reference(case, with_residual):
    numel, kind, seed = case
    x_N = vector(numel, kind, seed)
    residual_N = residual_for(x_N, seed) if with_residual else None
    got = histogram(x_N, residual_N)
    with reference_only():
        want = histogram(x_N, residual_N)
    assert all(torch.equal(a, b) for a, b in zip(got[:2], want[:2], strict=True))
    assert not with_residual or same_bits(got[2], want[2])
