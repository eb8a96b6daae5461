"""take and lay_runs: the C++ against their torch references, and what they refuse."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import InvalidSetting
from gradwire.kernels.gather import lay_runs, take
from gradwire.kernels.libraries import reference_only
from gradwire_lab.laws.tolerance import same_bits
from tests.each import each
from tests.strategies import bounded


@bounded(40)
@given(
    numel=st.integers(0, 40_000),
    density=st.sampled_from([0.0, 0.1, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    in_place=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_are_taken_and_leave_the_residual(
    numel: int, density: float, dtype: torch.dtype, in_place: bool, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    source_N = torch.randn(numel, generator=draw, dtype=dtype)
    indices_K = (torch.rand(numel, generator=draw) < density).nonzero().flatten().int()
    found = []
    for backend in (nullcontext(), reference_only()):
        own_N = source_N.clone()
        residual_N = own_N if in_place else torch.ones_like(own_N)
        values_K = torch.empty(indices_K.numel(), dtype=dtype)
        with backend:
            take(own_N, indices_K, values_K, scale=0.25, residual_N=residual_N)
        found.append((values_K, residual_N))
        assert torch.equal(values_K, 0.25 * source_N[indices_K.long()])
        assert not bool(residual_N[indices_K.long()].any())
        assert int((residual_N != 0).sum()) == numel - indices_K.numel()
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


@each("index", [-1, 5])
@each("dtype", [torch.float32, torch.float64])
def test_indices_outside_are_refused_and_nothing_is_written(index: int, dtype: torch.dtype) -> None:
    source_N, residual_N = torch.ones(5, dtype=dtype), torch.ones(5, dtype=dtype)
    indices_K = torch.tensor([0, index], dtype=torch.int32)
    values_K = torch.zeros(2, dtype=dtype)
    with pytest.raises(InvalidSetting, match=rf"indices_K\[1\] must lie in \[0, 5\), got {index}"):
        take(source_N, indices_K, values_K, residual_N=residual_N)
    assert residual_N.all()
    assert not values_K.any()


def test_runs_are_laid_where_they_are_told_and_shifted() -> None:
    counts_R, tos_R = torch.tensor([2, 0, 3]), torch.tensor([3, 9, 0])
    shifts_R = torch.tensor([10, 7, -5])
    numbers_K = torch.tensor([0, 4, 5, 6, 9], dtype=torch.int32)
    for backend in (nullcontext(), reference_only()):
        out = torch.full((9,), -1, dtype=torch.int32)
        with backend:
            lay_runs(numbers_K, counts_R, tos_R, shifts_R, out)
            assert out.tolist() == [0, 1, 4, 10, 14, -1, -1, -1, -1]
            lay_runs(None, counts_R, tos_R, shifts_R, out)
            assert out.tolist() == [-5, -4, -3, 10, 11, -1, -1, -1, -1]


def test_runs_that_do_not_fit_are_refused() -> None:
    one, out = torch.ones(1, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    for counts_R, tos_R in ((4 * one, one), (-one, one), (one, -one)):
        with pytest.raises(InvalidSetting, match=r"within \[0, 4\]"):
            lay_runs(None, counts_R, tos_R, one, out)
    with pytest.raises(InvalidSetting, match="numbers_K must be a contiguous vector of 2"):
        lay_runs(out, 2 * one, one, one, out)
    assert not out.any()
