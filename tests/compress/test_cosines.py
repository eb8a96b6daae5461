"""Cosine coefficients of chunks: the C++ against its reference, bit for bit, and its
definition.
"""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.errors import InvalidSetting
from gradwire.kernels.libraries import reference_only
from gradwire_lab.compress import _cosines as cosines
from gradwire_lab.compress._cosines import Cutting
from tests.each import each
from tests.kernels.vectors import (
    KINDS,
    compiled,
    num_threads,
    residual_for,
    same_bits,
    vector,
)

__all__ = ["compiled"]
SIZES = (0, 1, 2, 15, 16, 17, 63, 65, 200, 4095, 4096, 4097, 10_000)
SETTINGS = ((4, 3), (7, 5), (16, 256), (64, 32), (64, 1))
cases = st.tuples(st.sampled_from(SIZES), st.sampled_from(KINDS), st.integers(0, 2**16))


def listed(
    cutting: Cutting, grad_N: Tensor, residual_N: Tensor | None, wire: torch.dtype
) -> tuple[Tensor, Tensor]:
    places_K = torch.full((cutting.num_listed,), -1, dtype=torch.int32)
    values_K = grad_N.new_zeros(cutting.num_listed)
    cosines.encode_many(
        (cutting,), (grad_N,), (places_K,), (values_K,), (residual_N,), wire=wire
    )
    return places_K, values_K


def everything(
    cutting: Cutting, grad_N: Tensor, residual_N: Tensor | None
) -> list[Tensor]:
    """What is listed, the residual, and what two lists decode to, alone and added to a
    sum.
    """
    wire = torch.bfloat16 if residual_N is None else torch.float32
    kept_N = None if residual_N is None else residual_N.clone()
    places_K, values_K = listed(cutting, grad_N, kept_N, wire)
    places_LK, values_LK = (
        torch.stack([places_K] * 2),
        torch.stack([values_K, -3 * values_K]),
    )
    out_N, sum_N = torch.full_like(grad_N, math.nan), torch.ones_like(grad_N)
    cosines.decode(cutting, places_LK, values_LK, out_N, scale=0.25)
    cosines.decode(cutting, places_LK, values_LK, sum_N, scale=0.25, add=True)
    found = [places_K, values_K, out_N, sum_N]
    return found if kept_N is None else [*found, kept_N]


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Bits, but for those of a NaN: which of two NaNs a sum gives is the processor's
    choice.
    """
    return same_bits(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0)) and bool(
        (a.isnan() == b.isnan()).all()
    )


@pytest.mark.usefixtures("compiled")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    case=cases,
    setting=st.sampled_from(SETTINGS),
    summed=st.booleans(),
    threads=st.integers(1, 2),
)
def test_cpp_is_the_reference(
    case: tuple[int, str, int], setting: tuple[int, int], summed: bool, threads: int
) -> None:
    numel, kind, seed = case
    cutting, grad_N = Cutting(numel, *setting), vector(numel, kind, seed)
    residual_N = residual_for(grad_N, seed) if summed else None
    with num_threads(threads):
        got = everything(cutting, grad_N, residual_N)
    with reference_only():
        want = everything(cutting, grad_N, residual_N)
    assert all(same_numbers(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.usefixtures("compiled")
def test_many_vectors_are_each_as_alone() -> None:
    cuttings = [Cutting(numel, 16, 5) for numel in (1000, 0, 7, 256)]
    grads = [vector(cutting.numel, "normal", 1) for cutting in cuttings]
    alone = [
        listed(c, g, torch.zeros_like(g), torch.float32)
        for c, g in zip(cuttings, grads, strict=True)
    ]
    places = [torch.empty_like(places_K) for places_K, _ in alone]
    values = [torch.empty_like(values_K) for _, values_K in alone]
    residuals = [torch.zeros_like(grad_N) for grad_N in grads]
    cosines.encode_many(cuttings, grads, places, values, residuals, wire=torch.float32)
    for number, own in enumerate(alone):
        assert torch.equal(places[number], own[0])
        assert same_bits(values[number], own[1])


def dct(num: int) -> Tensor:
    """The orthonormal DCT-II as a matrix, by its definition."""
    rows, columns = (
        torch.arange(num).double()[:, None],
        torch.arange(num).double()[None, :],
    )
    matrix = torch.cos(math.pi / num * (columns + 0.5) * rows) * math.sqrt(2 / num)
    matrix[0] /= math.sqrt(2)
    return matrix


@each("rows, columns", [(64, 64), (1, 7), (3, 64), (16, 4), (1, 1)])
def test_coefficients_are_those_of_the_definition(rows: int, columns: int) -> None:
    chunks = torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(0))
    want = dct(rows) @ chunks.double() @ dct(columns).T
    assert torch.allclose(cosines.spectrum_of(chunks.double()), want, atol=1e-12)
    found = cosines.spectrum_of(chunks)
    assert float((found - want).abs().max()) < 2e-5
    assert float((cosines.spectrum_of(found, back=True) - chunks).abs().max()) < 4e-5


def test_the_largest_of_each_chunk_are_listed_and_ties_go_to_the_first() -> None:
    """A single coefficient of each chunk; and a chunk of zeros, all of which are
    alike.
    """
    spectrum = torch.zeros(3, 4, 4)
    spectrum[0, 1, 2], spectrum[1, 3, 0] = 5.0, -7.0
    grad_N = cosines.spectrum_of(spectrum, back=True).reshape(-1)
    places_K, values_K = listed(Cutting(48, 4, 1), grad_N, None, torch.float32)
    assert places_K.tolist() == [1 * 4 + 2, 16 + 3 * 4, 32]
    assert torch.allclose(values_K, torch.tensor([5.0, -7.0, 0.0]), atol=1e-5)


@each("forced", [False, True])
def test_a_place_outside_of_its_chunk_is_refused(forced: bool) -> None:
    cutting, out_N = Cutting(32, 4, 1), torch.zeros(32)
    # 15 is of the first chunk too
    places_LK = torch.tensor([[3, 15]], dtype=torch.int32)

    chosen = reference_only() if forced else contextlib.nullcontext()
    with chosen, pytest.raises(InvalidSetting, match="entry 1 of 2"):
        cosines.decode(cutting, places_LK, torch.ones(1, 2), out_N)


@each(
    "numel, shape, places, kept",
    [
        (4096, (0, 0), 4096, 32),
        (4097, (1, 1), 4097, 33),  # one element, and one coefficient
        (4096 + 100, (2, 64), 4096 + 128, 33),
        (4096 + 2048, (32, 64), 6144, 48),
        (5, (1, 5), 5, 1),
        (0, (0, 0), 0, 0),
    ],
)
def test_what_is_left_over_has_its_share(
    numel: int, shape: tuple[int, int], places: int, kept: int
) -> None:
    cutting = Cutting(numel, 64, 32)
    assert (cutting.last_shape, cutting.num_places, cutting.num_listed) == (
        shape,
        places,
        kept,
    )
