"""The calls that each tensor of a message takes."""

from __future__ import annotations

import torch

from gradwire.collective.steps.tensorwise import Tensorwise
from gradwire.compress.uniform import uniform
from gradwire.contract.spec import TensorSpec
from tests.calls import num_calls

MOST_CALLS = 95
"""The most calls that encode, merge and decode of one tensor take together."""


def round_trip(num_tensors: int) -> int:
    """The calls of the second message of so many tensors."""
    codec = Tensorwise(uniform(), (64,) * num_tensors)
    numel = 64 * num_tensors
    state = codec.init(TensorSpec("", numel))
    grad_N = torch.randn(numel)
    sum_N = torch.zeros(numel)

    def work() -> None:
        payload, _ = codec.encode(state, grad_N)
        codec.merge(payload, sum_N)
        codec.decode(payload, sum_N)

    work()
    return num_calls(work)


def test_one_tensor_more_takes_few_calls() -> None:
    assert (round_trip(30) - round_trip(10)) / 20 <= MOST_CALLS
