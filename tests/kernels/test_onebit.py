"""onebit: the C++ against its definition, bit for bit where the arithmetic allows it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.errors import InvalidSetting
from gradwire.kernels import onebit
from gradwire.kernels._build import reference_only

from .vectors import (
    VARIANTS,
    built_as,
    cases,
    compiled,
    num_threads,
    residual_for,
    runs_here,
    same_bits,
    vector,
)

__all__ = ["compiled"]
BLOCKS = (8, 24, 4096, 65536)


def encoded(x_N, residual_N=None, block=65536):
    scales_B2 = torch.full((-(-x_N.numel() // block), 2), 9.0)
    bits_U = torch.full((-(-x_N.numel() // 8),), 77, dtype=torch.uint8)
    after_N = None if residual_N is None else residual_N.clone()
    onebit.encode(x_N, scales_B2, bits_U, after_N, block=block)
    return scales_B2, bits_U, after_N


def decoded(scales_B2, bits_U, numel, scale=1.0, block=65536):
    out_N = torch.full((numel,), 5.0)
    onebit.decode(scales_B2, bits_U, out_N, scale=scale, block=block)
    return out_N


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_means_of_the_two_signs(dtype):
    scales, bits, _ = encoded(torch.tensor([-1.0, -3.0, 2.0, 4.0], dtype=dtype))
    assert bits.tolist() == [0b1100]
    assert decoded(scales, bits, 4).tolist() == [-2, -2, 3, 3]


def test_reference_by_hand():
    with reference_only():
        scales, bits, left = encoded(
            torch.tensor([1.0, -2.0, -0.0, 5.0, -4.0, 1.0, 1.0, 1.0, -7.0]), torch.zeros(9), block=8
        )
        assert bits.tolist() == [0b11101101, 0]
        assert scales.tolist() == [[-3.0, 1.5], [-7.0, 0.0]]
        assert left.tolist() == [-0.5, 1.0, -1.5, 3.5, -1.0, -0.5, -0.5, -0.5, 0.0]


@pytest.mark.usefixtures("compiled")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases, block=st.sampled_from(BLOCKS), with_residual=st.booleans())
def test_cpp_is_the_reference(case, block, with_residual):
    numel, kind, seed = case
    if numel > 5000 and block < 4096:
        block = 4096  # the reference loops over blocks
    x_N = vector(numel, kind, seed)
    residual_N = residual_for(x_N, seed) if with_residual else None
    scales, bits, after = encoded(x_N, residual_N, block)
    with reference_only():
        want_scales, want_bits, want_after = encoded(x_N, residual_N, block)
    assert same_bits(bits, want_bits)
    # Sums run in float over at most 128 elements, then in double: 128 * 2^-24 at the worst.
    torch.testing.assert_close(scales, want_scales, rtol=8e-6, atol=1e-44, equal_nan=True)
    if residual_N is not None:
        size = float(want_scales.nan_to_num(0.0, 0.0, 0.0).abs().max()) if numel else 0.0
        torch.testing.assert_close(after, want_after, rtol=0, atol=8e-6 * size + 1e-44)


@pytest.mark.usefixtures("compiled")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=cases, block=st.sampled_from(BLOCKS), scale=st.sampled_from([1.0, 0.25, 1 / 3]))
def test_decoding_is_the_reference_bit_for_bit(case, block, scale):
    numel, kind, seed = case
    x_N = vector(numel, kind, seed)
    scales, bits, _ = encoded(x_N, block=block)
    start_N = vector(numel, "normal", seed + 1)
    sum_N, want_sum_N = start_N.clone(), start_N.clone()
    out_N = decoded(scales, bits, numel, scale, block)
    onebit.decode_add(scales, bits, sum_N, block=block)
    with reference_only():
        want_N = decoded(scales, bits, numel, scale, block)
        onebit.decode_add(scales, bits, want_sum_N, block=block)
    assert torch.equal(out_N.nan_to_num(nan=4.5), want_N.nan_to_num(nan=4.5))
    assert torch.equal(sum_N.nan_to_num(nan=4.5), want_sum_N.nan_to_num(nan=4.5))


@pytest.mark.usefixtures("compiled")
def test_residual_is_what_was_not_encoded():
    x_N, residual_N = vector(150_001, "normal", 3), residual_for(torch.empty(150_001), 3)
    scales, bits, after_N = encoded(x_N, residual_N)
    assert same_bits(after_N, (x_N + residual_N) - decoded(scales, bits, x_N.numel()))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_block_keeps_its_residual_and_tells_in_its_scales(bad):
    x_N, residual_N = vector(200_000, "normal", 5), residual_for(torch.empty(200_000), 5)
    x_N[70_000] = bad
    scales, _, after_N = encoded(x_N, residual_N)
    assert scales.isfinite().all(1).tolist() == [True, False, True, True]
    assert scales.isnan().any() == (bad != bad)
    assert same_bits(after_N[65536:131072], residual_N[65536:131072])
    assert not torch.equal(after_N[:65536], residual_N[:65536])
    assert after_N.isfinite().all()


@pytest.mark.usefixtures("compiled")
def test_sums_beyond_float_range_have_finite_means():
    scales, _, after_N = encoded(vector(65536, "huge", 1), torch.zeros(65536))
    torch.testing.assert_close(scales, torch.tensor([[-3e38, 3e38]]))
    assert after_N.isfinite().all()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", ["normal", "not finite", "huge"])
def test_thread_count_changes_no_byte(kind):
    x_N, residual_N = vector(1_000_003, kind, 7), residual_for(torch.empty(1_000_003), 7)
    with num_threads(1):
        alone = encoded(x_N, residual_N)
    with num_threads(2):
        together = encoded(x_N, residual_N)
    for a, b in zip(alone, together, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("kind", ["normal", "huge", "subnormal"])
def test_all_builds_give_the_same_bytes(kind):
    x_N, residual_N = vector(200_003, kind, 9), residual_for(torch.empty(200_003), 8)
    results = []
    for variant in filter(runs_here, VARIANTS):
        with built_as(variant):
            results.append(encoded(x_N, residual_N))
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    ("scales", "bits", "residual", "block", "message"),
    [
        ((1, 2), 2, 10, 12, "block must be a positive multiple of 8, got 12"),
        ((2, 2), 2, 10, 16, r"scales_B2 must be contiguous float32 of shape \(1, 2\)"),
        ((1, 2), 3, 10, 16, "bits_U must be a contiguous vector of 2 elements"),
        ((1, 2), 2, 9, 16, "residual_N must be a contiguous vector of 10 elements"),
    ],
)
def test_wrong_operands_are_named(scales, bits, residual, block, message):
    with pytest.raises(InvalidSetting, match=message):
        onebit.encode(
            torch.zeros(10),
            torch.zeros(scales),
            torch.zeros(bits, dtype=torch.uint8),
            torch.zeros(residual),
            block=block,
        )


def test_strided_and_integer_gradients_are_refused():
    scales, bits = torch.zeros(1, 2), torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(InvalidSetting, match="contiguous vector"):
        onebit.encode(torch.zeros(16)[::2], scales, bits)
    with pytest.raises(InvalidSetting, match="floating point"):
        onebit.encode(torch.zeros(8, dtype=torch.int32), scales, bits)
