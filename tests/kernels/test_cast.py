"""cast16: the C++ against torch's own conversions, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.errors import InvalidSetting
from gradwire.kernels import cast
from gradwire.kernels.libraries import reference_only
from tests.each import each
from tests.kernels.vectors import cases, compiled, num_threads, residual_for, same_bits, vector

__all__ = ["compiled"]
DTYPES = [torch.float16, torch.bfloat16]


def encoded(x_N, dtype, prescale=1.0, residual_N=None):
    out_N = torch.empty(x_N.numel(), dtype=dtype)
    after_N = None if residual_N is None else residual_N.clone()
    cast.cast16_encode(x_N, out_N, prescale, after_N)
    return out_N, after_N


def without_nan(x_N):
    """One NaN for all: which one a conversion makes differs even within torch."""
    return torch.where(x_N.isnan(), torch.full_like(x_N, -77.0), x_N)


@pytest.mark.usefixtures("compiled")
@each("dtype", DTYPES, ids=str)
def test_every_exponent_rounds_as_torch_does(dtype):
    # All float32 whose low mantissa bits decide the rounding, for every sign and exponent.
    high = torch.arange(2**16, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (high[:, None] | low).flatten()
    x_N = bits.to(torch.int32).view(torch.float32)
    assert same_bits(without_nan(encoded(x_N, dtype)[0]), without_nan(x_N.to(dtype)))


@pytest.mark.usefixtures("compiled")
@each("dtype", DTYPES, ids=str)
def test_every_16_bit_value_decodes_as_in_torch(dtype):
    half_N = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    out_N = torch.empty(2**16)
    cast.cast16_decode(half_N, out_N)
    assert same_bits(without_nan(out_N), without_nan(half_N.float()))


@pytest.mark.usefixtures("compiled")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    case=cases,
    dtype=st.sampled_from(DTYPES),
    prescale=st.sampled_from([1.0, 0.25, 1 / 3, 7e4]),
    with_residual=st.booleans(),
)
def test_cpp_is_the_reference(case, dtype, prescale, with_residual):
    numel, kind, seed = case
    x_N = vector(numel, kind, seed)
    residual_N = residual_for(x_N, seed) if with_residual else None
    half_N, after_N = encoded(x_N, dtype, prescale, residual_N)
    out_N, sum_N = torch.empty(numel), vector(numel, "normal", seed)
    cast.cast16_decode(half_N, out_N, 1 / prescale)
    cast.cast16_decode(half_N, sum_N, 0.3, add=True)
    with reference_only():
        want_half_N, want_after_N = encoded(x_N, dtype, prescale, residual_N)
        want_N, want_sum_N = torch.empty(numel), vector(numel, "normal", seed)
        cast.cast16_decode(half_N, want_N, 1 / prescale)
        cast.cast16_decode(half_N, want_sum_N, 0.3, add=True)
    pairs = [(half_N, want_half_N), (out_N, want_N), (sum_N, want_sum_N)]
    if after_N is not None:
        assert after_N.isfinite().all()
        pairs.append((after_N, want_after_N))
    for got, want in pairs:
        assert same_bits(without_nan(got), without_nan(want))


@each("forced", [False, True])
def test_overflow_becomes_inf_and_keeps_the_residual(forced):
    context = reference_only() if forced else num_threads(1)
    with context:
        half_N, after_N = encoded(
            torch.tensor([1e6, 1.0009765625 + 2**-12]), torch.float16, 1.0, torch.tensor([0.5, 0.0])
        )
        assert half_N.tolist() == [math.inf, 1.0009765625]
        assert after_N.tolist() == [0.5, 2**-12]
        assert encoded(torch.tensor([1e6]), torch.float16, 0.01)[0].tolist() == [10000.0]


def test_wrong_operands_are_named():
    x_N = torch.zeros(4)
    with pytest.raises(InvalidSetting, match=r"out_N must be of dtype torch\.float16 or"):
        cast.cast16_encode(x_N, torch.zeros(4))
    with pytest.raises(InvalidSetting, match="prescale must be a positive finite number, got 0"):
        encoded(x_N, torch.float16, 0.0)
    with pytest.raises(InvalidSetting, match="in_N must be a contiguous vector of 4 elements"):
        cast.cast16_decode(torch.zeros(3, dtype=torch.float16), x_N)
