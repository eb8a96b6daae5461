"""Histograms and norms of ranges: the C++ against its definition, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradwire.errors import InvalidSetting
from gradwire.kernels import magnitudes
from gradwire.kernels.build import reference_only
from tests.kernels.vectors import cases, compiled, num_threads, residual_for, same_bits, vector

__all__ = ["compiled"]


def histogram(x_N, residual_N=None):
    after_N = None if residual_N is None else residual_N.clone()
    found = magnitudes.histogram(x_N, after_N)
    return [*found, after_N][: 2 + (residual_N is not None)]


@pytest.mark.parametrize("forced", [False, True])
def test_a_bin_is_the_upper_half_without_the_sign(forced):
    x_N = torch.tensor([1.0, -1.001, 2.0, 0.0, -torch.inf, torch.nan, -0.0, 1.0])
    with reference_only() if forced else num_threads(1):
        bins_B, counts_B2 = histogram(x_N)
    assert bins_B.tolist() == [0, 0x3F80, 0x4000, 0x7F80, 0x7FC0]
    assert counts_B2.tolist() == [[1, 1], [2, 1], [1, 0], [0, 1], [1, 0]]


def test_other_dtypes_are_in_a_bin_whose_edge_they_reach():
    wide_N = torch.tensor([1.0, 1e-12 - 2, 1e300, -1e300, torch.inf], dtype=torch.float64)
    assert histogram(wide_N)[0].tolist() == [0x3F80, 0x3FFF, 0x7F7F, 0x7F80]
    narrow_N = torch.tensor([0.5, -65504.0], dtype=torch.float16)
    assert histogram(narrow_N)[1].tolist() == [[1, 0], [0, 1]]


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


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", ["normal", "all equal"])
def test_thread_count_changes_no_count(kind):
    x_N = vector(1_200_003, kind, 7)
    found = []
    for count in (1, 2):
        with num_threads(count):
            found.append(histogram(x_N))
    assert int(found[0][1].sum()) == x_N.numel()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


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


def test_outside_the_ranges_nothing_is_added():
    _, after_N = norms(torch.ones(5), [1, 4], [3, 4], torch.zeros(5))
    assert after_N.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0]


def test_ranges_are_checked():
    for starts, stops in (([0], [6]), ([3], [2]), ([-1], [2])):
        with pytest.raises(InvalidSetting, match="within"):
            norms(torch.ones(5), starts, stops)
