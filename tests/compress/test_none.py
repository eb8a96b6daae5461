"""none: the gradient as it is, in its own dtype."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_costs_what_the_gradient_takes(dtype: torch.dtype) -> None:
    grad_N = torch.randn(9).to(dtype)
    payload, _ = gw.compress.none().encode(None, grad_N)
    assert payload.size_bytes == 9 * dtype.itemsize
    assert torch.equal(payload["values"], grad_N)


@pytest.mark.parametrize("shape", [(2, 3), ()])
def test_gradients_are_flat(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"gradient must be one-dimensional.*grad.flatten\(\)"):
        gw.compress.none().encode(None, torch.zeros(shape))
