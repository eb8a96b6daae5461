"""topk: how many, which ones, and what they cost."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.errors import InvalidSetting
from tests.each import each


@each(
    "density, numel, k",
    [(0.01, 1000, 10), (0.01, 1, 1), (0.01, 49, 1), (0.01, 0, 0), (0.5, 7, 4), (1.0, 7, 7)],
)
def test_k_is_the_density_of_n_but_at_least_one(density: float, numel: int, k: int) -> None:
    payload, _ = gw.compress.topk(density=density).encode(None, torch.randn(numel))
    assert payload["indices"].numel() == payload["values"].numel() == k
    assert payload.size_bytes == 8 * k


def test_sixteen_bit_values_cost_six_bytes() -> None:
    codec = gw.compress.topk(density=0.5, values=torch.float16)
    payload, _ = codec.encode(None, torch.randn(20))
    assert payload.size_bytes == 6 * 10


def test_is_scaled_before_it_is_rounded() -> None:
    """A sum of 8 gradients of 60000 is no float16, its mean is."""
    codec = gw.compress.topk(density=1.0)
    payload, _ = codec.encode(None, torch.tensor([8 * 60000.0]))
    back_N = codec.decode(payload, torch.empty(1, dtype=torch.float16), scale=1 / 8)
    assert back_N.tolist() == [60000.0]


def test_more_than_int32_can_index_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(InvalidSetting, match="cut it into chunks"):
        gw.compress.topk().format(gw.TensorSpec("huge", 2**31))
