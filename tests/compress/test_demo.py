"""demo: its bytes, what it keeps of a message of several ranks, and settings that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.errors import InvalidSetting


def test_its_bytes_are_those_of_the_formula() -> None:
    """32 of 4096 coefficients: 16 bits of value, 7 low and 2 high bits of the place each."""
    spec = gw.TensorSpec("weight", 10 * 4096)
    assert gw.compress.demo().format(spec).size_bytes == 10 * 32 * (16 + 7 + 2) // 8
    assert gw.compress.demo(values=torch.float32).format(spec).size_bytes == 10 * 32 * 41 // 8


def test_a_wave_takes_one_coefficient() -> None:
    """Along both sides of a chunk: whatever is a product of cosines is one coefficient."""
    at = (torch.arange(64) + 0.5) * torch.pi / 64
    grad_N = torch.outer(torch.cos(3 * at), torch.cos(5 * at)).flatten()
    codec = gw.compress.demo(keep=1, values=torch.float32)
    payload, _ = codec.encode(None, grad_N)
    assert torch.allclose(codec.decode(payload, torch.empty(4096)), grad_N, atol=1e-5)


def test_rounding_of_values_stays_in_the_residual() -> None:
    grad_N = torch.full((16,), 1.0 + 2**-10)
    residual_N = torch.zeros(16)
    codec = gw.compress.demo(side=4, keep=1)
    payload, _ = codec.encode(None, grad_N, residual_N=residual_N)
    assert payload["values"].tolist() == [4.0]
    assert torch.allclose(residual_N, torch.full((16,), 2**-10), atol=1e-6)


def test_ranks_are_added_up_before_the_transform_and_to_the_same_sum() -> None:
    draw = torch.Generator().manual_seed(0)
    codec = gw.compress.demo(side=8, keep=5)
    payloads = [codec.encode(None, torch.randn(300, generator=draw))[0] for _ in range(3)]
    want_N = sum(codec.decode(one, torch.empty(300)) for one in payloads)
    sum_N = torch.ones(300)
    codec.merge_all(payloads, sum_N, scale=0.5)
    assert torch.allclose(sum_N, 1 + 0.5 * want_N, atol=1e-5)


def test_it_goes_by_an_all_gather_and_no_scheme_takes_its_entries_for_elements() -> None:
    exchange = gw.exchange_for(gw.compress.demo())
    assert exchange == gw.with_error_feedback(
        gw.pair(gw.compress.demo(), gw.collective.allgather_sparse())
    )
    with pytest.raises(gw.InvalidSetting, match="these are transformed; use allgather_sparse"):
        gw.pair(gw.compress.demo(), gw.collective.zen())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"side": 48}, "demo side must be a power of two, got 48"),
        ({"side": 128}, "demo side must be a whole number, 4 to 64"),
        ({"keep": 0}, "demo keep must be a whole number, 1 to 4096"),
        ({"side": 8, "keep": 65}, "demo keep must be a whole number, 1 to 64"),
        ({"values": torch.float16}, "demo values must be torch.bfloat16 or torch.float32"),
    ],
)
def test_settings_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidSetting, match=why):
        gw.compress.demo(**settings)
