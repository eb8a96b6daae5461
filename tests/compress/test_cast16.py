"""cast16: rounding, and the pre-scaling that keeps sums in float16's range."""

from __future__ import annotations

import torch

import gradwire as gw
from tests.each import each


@each("dtype", [torch.bfloat16, torch.float16])
def test_rounds_as_torch_does_in_two_bytes(dtype: torch.dtype) -> None:
    grad_N = torch.randn(100)
    codec = gw.compress.cast16(dtype=dtype)
    payload, _ = codec.encode(None, grad_N)
    assert payload.size_bytes == 200
    assert torch.equal(codec.decode(payload, torch.empty(100)), grad_N.to(dtype).float())
