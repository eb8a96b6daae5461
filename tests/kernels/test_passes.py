"""Kernels of one pass: the C++ against its definition, bit for bit."""

from __future__ import annotations

import math
import zlib
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.errors import InvalidSetting
from gradwire.kernels import cast
from gradwire.kernels.crc import crc32
from gradwire.kernels.distinct import count_distinct
from gradwire.kernels.libraries import reference_only
from gradwire_lab.compress._gather import lay_runs, take
from gradwire_lab.kernels import magnitudes, momentum
from tests.each import each
from tests.kernels.vectors import (
    cases,
    compiled,
    num_threads,
    residual_for,
    same_bits,
    vector,
)
from tests.strategies import bounded

# ---- cast16 --------------------------------------------------------------------------

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
    # All float32 whose low mantissa bits decide the rounding, for every sign and
    # exponent.
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
def test_cast_is_the_reference(case, dtype, prescale, with_residual):
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
            torch.tensor([1e6, 1.0009765625 + 2**-12]),
            torch.float16,
            1.0,
            torch.tensor([0.5, 0.0]),
        )
        assert half_N.tolist() == [math.inf, 1.0009765625]
        assert after_N.tolist() == [0.5, 2**-12]
        assert encoded(torch.tensor([1e6]), torch.float16, 0.01)[0].tolist() == [
            10000.0
        ]


def test_wrong_operands_are_named():
    x_N = torch.zeros(4)
    with pytest.raises(
        InvalidSetting, match=r"out_N must be of dtype torch\.float16 or"
    ):
        cast.cast16_encode(x_N, torch.zeros(4))
    with pytest.raises(
        InvalidSetting, match="prescale must be a positive finite number, got 0"
    ):
        encoded(x_N, torch.float16, 0.0)
    with pytest.raises(
        InvalidSetting, match="in_N must be a contiguous vector of 4 elements"
    ):
        cast.cast16_decode(torch.zeros(3, dtype=torch.float16), x_N)


# ---- momentum correction -------------------------------------------------------------

SMALLEST = 1e-45


def accumulated(
    grad_N: Tensor, seed: int, nesterov: bool, with_whole: bool
) -> list[Tensor]:
    """u, v and, if asked for, v + g."""
    velocity_N, pending_N = (
        residual_for(grad_N, 2 * seed + 1),
        residual_for(grad_N, seed),
    )
    whole_N = torch.empty_like(grad_N) if with_whole else None
    momentum.accumulate(
        grad_N, velocity_N, pending_N, whole_N, momentum=0.9, nesterov=nesterov
    )
    return [velocity_N, pending_N, *([] if whole_N is None else [whole_N])]


@pytest.mark.usefixtures("compiled")
@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=cases, nesterov=st.booleans(), with_whole=st.booleans())
def test_velocity_is_the_reference(
    case: tuple[int, str, int], nesterov: bool, with_whole: bool
) -> None:
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
        (
            [0.0, 2.0, 0.0],
            2.0,
            [0.0, 5.0, 5.0],
        ),  # 2 stayed; the third was nothing before
        ([0.0, 2.0, 0.0], 2.5, [5.0, 5.0, 5.0]),  # 2 is too small to count
        (
            [0.0, 1.5, 0.0],
            SMALLEST,
            [5.0, 5.0, 5.0],
        ),  # part of 2 left: no velocity is older
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


# ---- norms of ranges -----------------------------------------------------------------


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
        assert norm == pytest.approx(
            float(x_N[start:stop].double().square().sum()), rel=1e-12
        )


# ---- the size of a union of index lists ----------------------------------------------

PLACES = (1, 63, 64, 65, 2**18 - 1, 2**18, 2**18 + 1, 600_000)


def drawn(num_places: int, density: float, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (
        (torch.rand(num_places, generator=random) < density).nonzero().flatten().int()
    )


@pytest.mark.usefixtures("compiled")
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    num_places=st.sampled_from(PLACES),
    densities=st.lists(st.sampled_from([0.0, 0.0001, 0.01, 0.5, 1.0]), max_size=3),
    seed=st.integers(0, 2**16),
)
def test_distinct_places_are_counted_once(
    num_places: int, densities: list[float], seed: int
) -> None:
    lists = [
        drawn(num_places, density, seed + i) for i, density in enumerate(densities)
    ]
    named_N = torch.zeros(num_places, dtype=torch.bool)
    for indices_K in lists:
        named_N[indices_K.long()] = True
    want = int(named_N.sum())
    for threads in (1, 2):
        with num_threads(threads):
            assert count_distinct(lists, num_places) == want
    with reference_only():
        assert count_distinct(lists, num_places) == want


@pytest.mark.usefixtures("compiled")
@each(
    "places",
    [
        [3, 1],
        [1, 1, 2],
        [300_000, 2],
        [2, 300_000, 5],
        [300_000, 300_001, 1, 2],
        [0] * 70,
    ],
    ids=str,
)
def test_a_list_that_does_not_ascend_is_counted_all_the_same(places: list[int]) -> None:
    lists = [torch.tensor(places).int(), torch.tensor([1, 400_000]).int()]
    assert count_distinct(lists, 600_000) == len({*places, 1, 400_000})


@pytest.mark.usefixtures("compiled")
@each("place", [-1, 100, 2**31 - 1])
def test_an_index_outside_is_refused(place: int) -> None:
    outside = torch.tensor([place]).int()
    with pytest.raises(InvalidSetting, match=r"\[0, 100\)"):
        count_distinct([torch.tensor([5]).int(), outside], 100)


# ---- take and lay_runs ---------------------------------------------------------------


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
def test_indices_outside_are_refused_and_nothing_is_written(
    index: int, dtype: torch.dtype
) -> None:
    source_N, residual_N = torch.ones(5, dtype=dtype), torch.ones(5, dtype=dtype)
    indices_K = torch.tensor([0, index], dtype=torch.int32)
    values_K = torch.zeros(2, dtype=dtype)
    with pytest.raises(
        InvalidSetting, match=rf"indices_K\[1\] must lie in \[0, 5\), got {index}"
    ):
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
    with pytest.raises(
        InvalidSetting, match="numbers_K must be a contiguous vector of 2"
    ):
        lay_runs(out, 2 * one, one, one, out)
    assert not out.any()


# ---- CRC-32 --------------------------------------------------------------------------


@each("numel", [0, 1, 15, 63, 64, 65, 79, 80, 127, 128, 143, 1000, 100_003])
@each("start", [0, 1, 5])
def test_the_bits_are_those_of_zlib(numel: int, start: int) -> None:
    bytes_B = torch.randint(0, 256, (start + numel,), dtype=torch.uint8)[start:]
    whole = bytes_B.numpy().tobytes()
    assert crc32(bytes_B) == zlib.crc32(whole)
    assert crc32(bytes_B, 12345) == zlib.crc32(whole, 12345)
    with reference_only():
        assert crc32(bytes_B) == zlib.crc32(whole)
