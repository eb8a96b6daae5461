"""demo: its transform is the cosines' of its paper."""

from __future__ import annotations

import torch

import gradwire as gw


def test_a_wave_takes_one_coefficient() -> None:
    """Along both sides of a chunk: whatever is a product of cosines is one coefficient."""
    at = (torch.arange(64) + 0.5) * torch.pi / 64
    grad_N = torch.outer(torch.cos(3 * at), torch.cos(5 * at)).flatten()
    codec = gw.compress.demo(keep=1, values=torch.float32)
    payload, _ = codec.encode(None, grad_N)
    assert torch.allclose(codec.decode(payload, torch.empty(4096)), grad_N, atol=1e-5)
