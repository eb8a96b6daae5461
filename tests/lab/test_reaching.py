"""What reaches a threshold: the C++ against its definition, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradwire.kernels.libraries import reference_only
from gradwire_lab.compress import _reaching
from tests.each import each
from tests.kernels.vectors import (
    cases,
    compiled,
    num_threads,
    residual_for,
    same_bits,
    vector,
)

__all__ = ["compiled"]


def reaching(x_N, threshold, most, residual_N=None, *, sums_given=False):
    """(indices, values, residual) of what reaches a threshold; see
    ``_reaching.reaching``.
    """
    listed = []
    after_N = None if residual_N is None else residual_N.clone()

    def room(count):
        listed.extend(
            (
                torch.full((count,), -1, dtype=torch.int32),
                torch.full((count,), 7.0, dtype=x_N.dtype),
            )
        )
        return listed

    _reaching.reaching(None if sums_given else x_N, threshold, most, room, after_N)
    return [*listed, after_N][: 2 + (residual_N is not None)]


@each("forced", [False, True])
def test_beyond_most_the_largest_are_listed(forced):
    x_N = torch.tensor([3.0, -torch.inf, 1.0, torch.nan, 2.0, 0.0])
    with reference_only() if forced else num_threads(1):
        indices, _, after = reaching(x_N, 0.0, 3, torch.zeros(6))
        assert indices.tolist() == [0, 1, 3]
        assert after.tolist() == [0.0, 0.0, 1.0, 0.0, 2.0, 0.0]
        assert reaching(x_N, 0.0, 9)[0].tolist() == [0, 1, 2, 3, 4]  # zeros never are
        assert reaching(x_N, torch.inf, 9)[0].tolist() == [1, 3]


@pytest.mark.smoke
@pytest.mark.usefixtures("compiled")
@settings(max_examples=25, deadline=None, derandomize=True)
@example(case=(200_003, "not finite", 1), spot=3, share=0.1, kind="sums")
@example(case=(200_003, "all equal", 0), spot=3, share=0.1, kind="residual")
@example(case=(200_003, "normal", 1), spot=4, share=0.5, kind="residual")
@example(case=(200_003, "normal", 1), spot=5, share=0.01, kind="residual")
@given(
    case=cases,
    spot=st.integers(0, 199),
    share=st.sampled_from([0.001, 0.1, 0.5, 1.0]),
    kind=st.sampled_from(["plain", "residual", "sums"]),
)
def test_cpp_reaching_is_the_reference(case, spot, share, kind):
    numel, content, seed = case
    x_N = vector(numel, content, seed)
    threshold = float(x_N[spot % numel].abs().nan_to_num(1.0)) if numel else 1.0
    residual_N = {"plain": None, "residual": residual_for(x_N, seed), "sums": x_N}[kind]
    most = max(1, round(share * numel))
    got = reaching(x_N, threshold, most, residual_N, sums_given=kind == "sums")
    with reference_only():
        want = reaching(x_N, threshold, most, residual_N, sums_given=kind == "sums")
    assert len(got) == len(want)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
