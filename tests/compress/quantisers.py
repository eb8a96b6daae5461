"""What the tests of quantisers share: many encodings of one gradient, and settings to refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.contract import Compressor
from gradwire.errors import InvalidSetting


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


def assert_refused(make: Callable[..., Any], setting: str, given: object, accepted: str) -> None:
    """The message names the setting, what was given and what is accepted."""
    with pytest.raises(InvalidSetting) as caught:
        make(**{setting: given})
    for part in (setting, repr(given), accepted):
        assert part in str(caught.value)
