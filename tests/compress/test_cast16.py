"""cast16: rounding, and the pre-scaling that keeps sums in float16's range."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from tests.each import each

WORLD = 8


@each("dtype", [torch.bfloat16, torch.float16])
def test_rounds_as_torch_does_in_two_bytes(dtype: torch.dtype) -> None:
    grad_N = torch.randn(100)
    codec = gw.compress.cast16(dtype=dtype)
    payload, _ = codec.encode(None, grad_N)
    assert payload.size_bytes == 200
    assert torch.equal(codec.decode(payload, torch.empty(100)), grad_N.to(dtype).float())


@each(
    "collective",
    [gw.collective.allreduce(), gw.collective.ring(), gw.collective.casync_ps()],
)
@each("dtype", [torch.float32, torch.float16])
def test_sum_of_near_max_gradients_does_not_overflow(collective, dtype: torch.dtype) -> None:
    """Eight times 60000 is far beyond float16's 65504; the mean is not."""
    codec = gw.compress.cast16(dtype=torch.float16)
    exchange = gw.pair(codec, collective)
    grads = [torch.full((100,), 60000.0, dtype=dtype) for _ in range(WORLD)]
    for mean_N, _, _ in gw.run_local(exchange, grads):
        assert mean_N.dtype == dtype
        # Summing on the way rounds to float16 at every rank; overflow would be inf.
        assert mean_N.tolist() == pytest.approx([60000.0] * 100, rel=2e-3)
