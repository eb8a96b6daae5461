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


def test_without_prescale_the_same_sum_would_overflow() -> None:
    codec = gw.compress.cast16(dtype=torch.float16)
    payload, _ = codec.encode(None, torch.full((1,), 60000.0))
    assert (payload["values"] * WORLD).isinf().all()
    payload, _ = codec.for_world(WORLD).encode(None, torch.full((1,), 60000.0))
    assert (payload["values"] * WORLD).isfinite().all()


def test_prescaling_by_a_power_of_two_changes_no_decoded_bit() -> None:
    grad_N = torch.randn(1000)
    plain, scaled = gw.compress.cast16(), gw.compress.cast16().for_world(WORLD)
    back = [
        codec.decode(codec.encode(None, grad_N)[0], torch.empty(1000)) for codec in (plain, scaled)
    ]
    assert torch.equal(*back)
