"""topk: how many, which ones, and what they cost."""

from __future__ import annotations

import torch

import gradwire as gw
from tests.each import each


@each(
    "density, numel, k",
    [(0.01, 1000, 10), (0.01, 1, 1), (0.01, 49, 1), (0.01, 0, 0), (0.5, 7, 4), (1.0, 7, 7)],
)
def test_k_is_the_density_of_n_but_at_least_one(density: float, numel: int, k: int) -> None:
    payload, _ = gw.compress.topk(density=density).encode(None, torch.randn(numel))
    assert payload["indices"].numel() == payload["values"].numel() == k
    assert payload.size_bytes == 8 * k


def test_is_scaled_before_it_is_rounded() -> None:
    """A sum of 8 gradients of 60000 is no float16, its mean is."""
    codec = gw.compress.topk(density=1.0)
    payload, _ = codec.encode(None, torch.tensor([8 * 60000.0]))
    back_N = codec.decode(payload, torch.empty(1, dtype=torch.float16), scale=1 / 8)
    assert back_N.tolist() == [60000.0]
