"""Tensor specs, and how a gradient is cut into chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.contract.spec import (
    CHUNK_ALIGNMENT,
    TensorSpec,
    chunk_bounds,
    working_dtype,
)
from gradwire.errors import InvalidSetting
from tests.each import each
from tests.strategies import bounded


@bounded(200)
@given(numel=st.integers(0, 5000), num_chunks=st.integers(1, 40))
def test_chunks_cover_every_element_once_in_order(numel: int, num_chunks: int) -> None:
    bounds = chunk_bounds(numel, num_chunks)
    assert len(bounds) == num_chunks
    assert bounds[0][0] == 0
    assert bounds[-1][1] == numel
    for (_, stop), (start, _) in pairwise(bounds):
        assert stop == start
    lengths = [stop - start for start, stop in bounds]
    assert lengths == sorted(lengths, reverse=True)
    assert all(start % CHUNK_ALIGNMENT == 0 or start == numel for start, _ in bounds)
    assert max(lengths) - numel / num_chunks < CHUNK_ALIGNMENT + 1


def test_a_chunk_is_a_spec_that_tells_where_it_is_from() -> None:
    spec = TensorSpec("fc.weight", 20, torch.bfloat16)
    assert spec.size_bytes == 40
    assert spec.chunk(8, 16) == TensorSpec("fc.weight[8:16]", 8, torch.bfloat16)


@each(
    "numel, dtype, message",
    [
        (-1, torch.float32, "numel must be 0 or more, got -1"),
        (
            3,
            torch.int64,
            "dtype must be float32, bfloat16, float16 or float64, got torch.int64",
        ),
        (3, torch.complex64, "dtype must be float32, .* got torch.complex64"),
        (3, torch.float8_e4m3fn, "dtype must be float32, .* got torch.float8_e4m3fn"),
    ],
)
def test_a_spec_of_what_is_no_gradient_is_refused(
    numel: int, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(InvalidSetting, match=message):
        TensorSpec("x", numel, dtype)


def test_sums_are_made_in_float32_or_better() -> None:
    assert working_dtype(torch.float16) == torch.float32
    assert working_dtype(torch.bfloat16) == torch.float32
    assert working_dtype(torch.float32) == torch.float32
    assert working_dtype(torch.float64) == torch.float64
