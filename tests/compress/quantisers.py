"""What the tests of quantisers share: many encodings of one gradient, and settings to refuse."""

from __future__ import annotations

import torch
from torch import Tensor

import gradwire as gw
from gradwire.contract import Compressor


def decoded(codec: Compressor, grad_N: Tensor, num_steps: int = 1) -> Tensor:
    """What each of several steps sends of one gradient: shape (S, N)."""
    state = codec.init(gw.TensorSpec("weight", grad_N.numel()))
    sent_SN = torch.empty(num_steps, grad_N.numel())
    for out_N in sent_SN:
        payload, state = codec.encode(state, grad_N)
        codec.decode(payload, out_N)
    return sent_SN


def normal(numel: int, seed: int = 0) -> Tensor:
    """A gradient of standard normals."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))
