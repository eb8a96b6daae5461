"""Momentum correction's passes: the C++ against its definition, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.kernels import momentum
from gradwire.kernels.libraries import reference_only
from tests.each import each
from tests.kernels.vectors import cases, compiled, num_threads, residual_for, same_bits, vector

__all__ = ["compiled"]
SMALLEST = 1e-45


def accumulated(grad_N: Tensor, seed: int, nesterov: bool, with_whole: bool) -> list[Tensor]:
    """u, v and, if asked for, v + g."""
    velocity_N, pending_N = residual_for(grad_N, 2 * seed + 1), residual_for(grad_N, seed)
    whole_N = torch.empty_like(grad_N) if with_whole else None
    momentum.accumulate(grad_N, velocity_N, pending_N, whole_N, momentum=0.9, nesterov=nesterov)
    return [velocity_N, pending_N, *([] if whole_N is None else [whole_N])]


@pytest.mark.usefixtures("compiled")
@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=cases, nesterov=st.booleans(), with_whole=st.booleans())
def test_cpp_is_the_reference(case: tuple[int, str, int], nesterov: bool, with_whole: bool) -> None:
    numel, kind, seed = case
    grad_N = vector(numel, kind, seed)
    got = accumulated(grad_N, seed, nesterov, with_whole)
    with reference_only():
        want = accumulated(grad_N, seed, nesterov, with_whole)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    assert bool(got[0].isfinite().all()), "momentum keeps what is not finite"


@pytest.mark.usefixtures("compiled")
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    case=cases,
    left=st.sampled_from([0.0, 0.0001, 0.01, 0.5, 1.0]),
    threads=st.integers(1, 2),
    least=st.sampled_from([SMALLEST, 1.0, 5.0]),
)
def test_the_mask_is_the_reference(
    case: tuple[int, str, int], left: float, threads: int, least: float
) -> None:
    numel, kind, seed = case
    whole_N = vector(numel, kind, seed)
    random = torch.Generator().manual_seed(seed)
    left_N = torch.rand(numel, generator=random) < left
    pending_N = torch.where(left_N | ~whole_N.isfinite(), 0.0, whole_N)
    before_N = torch.randn(numel, generator=random)
    got, want = before_N.clone(), before_N.clone()
    with num_threads(threads):
        momentum.mask(got, whole_N, pending_N, least=least)
    with reference_only():
        momentum.mask(want, whole_N, pending_N, least=least)
    assert same_bits(got, want)


@each("forced", [False, True])
@each(
    "pending, least, velocity",
    [
        ([0.0, 2.0, 0.0], 2.0, [0.0, 5.0, 5.0]),  # 2 stayed; the third was nothing before
        ([0.0, 2.0, 0.0], 2.5, [5.0, 5.0, 5.0]),  # 2 is too small to count
        ([0.0, 1.5, 0.0], SMALLEST, [5.0, 5.0, 5.0]),  # part of 2 left: no velocity is older
        ([1.0, 1.5, 0.0], SMALLEST, [5.0, 0.0, 5.0]),  # part of 2 left, and 1 stayed
        ([1.0, 2.0, 0.0], SMALLEST, [5.0, 5.0, 5.0]),  # nothing left
    ],
)
def test_velocity_is_cleared_where_something_left_and_something_stayed(
    pending: list[float], least: float, velocity: list[float], forced: bool
) -> None:
    def mask() -> list[float]:
        velocity_N = torch.full((3,), 5.0)
        whole_N = torch.tensor([1.0, 2.0, 0.0])
        momentum.mask(velocity_N, whole_N, torch.tensor(pending), least=least)
        return velocity_N.tolist()

    if forced:
        with reference_only():
            assert mask() == velocity
    else:
        assert mask() == velocity
