"""The calls that each gradient takes in the backward pass."""

from __future__ import annotations

import torch
from torch import nn

import gradwire as gw
from tests.calls import num_calls

MOST_CALLS = 22


def backward(num_params: int) -> int:
    """The calls of the second backward pass of a model that is alone."""
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(num_params)])
    handle = gw.attach(model, "none")
    inputs = torch.ones(1, 4)
    model(inputs).sum().backward()
    loss = model(inputs).sum()
    found = num_calls(loss.backward)
    handle.detach()
    return found


def test_one_gradient_more_takes_few_calls() -> None:
    assert (backward(30) - backward(10)) / 20 <= MOST_CALLS
