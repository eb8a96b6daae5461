"""demo: its bytes, what it keeps of a message of several ranks, and settings that are refused."""

from __future__ import annotations

import torch

import gradwire as gw


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
