"""Norms of ranges: the C++ against its definition, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.kernels import magnitudes
from gradwire.kernels.libraries import reference_only
from tests.kernels.vectors import cases, compiled, num_threads, residual_for, same_bits, vector

__all__ = ["compiled"]


def norms(x_N, starts, stops, residual_N=None):
    after_N = None if residual_N is None else residual_N.clone()
    tables = [torch.tensor(table, dtype=torch.int64) for table in (starts, stops)]
    norms_L = torch.full((len(starts),), 7.0, dtype=torch.float64)
    magnitudes.range_norms(x_N, *tables, norms_L, after_N)
    return norms_L, after_N


@pytest.mark.usefixtures("compiled")
@settings(max_examples=20, deadline=None, derandomize=True)
@given(case=cases, with_residual=st.booleans(), threads=st.sampled_from([1, 2]))
def test_cpp_norms_are_the_reference(case, with_residual, threads):
    numel, kind, seed = case
    x_N = vector(numel, kind, seed)
    residual_N = residual_for(x_N, seed) if with_residual else None
    edges = [0, numel // 100, numel // 100, numel // 3, numel]
    with num_threads(threads):
        got, got_after = norms(x_N, edges[:-1], edges[1:], residual_N)
    with reference_only():
        want, want_after = norms(x_N, edges[:-1], edges[1:], residual_N)
    assert torch.equal(got.nan_to_num(-1.0), want.nan_to_num(-1.0))
    assert not with_residual or same_bits(got_after, want_after)
    if with_residual or kind not in ("normal", "ties"):
        return
    for norm, start, stop in zip(got.tolist(), edges[:-1], edges[1:], strict=True):
        assert norm == pytest.approx(float(x_N[start:stop].double().square().sum()), rel=1e-12)
