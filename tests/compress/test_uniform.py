"""uniform: figure 5 of HiPress, and what the random numbers of a quantiser follow."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from tests.compress.quantisers import decoded, normal
from tests.each import each
from tests.strategies import bounded

uniform = gw.compress.uniform


def test_levels_are_even_from_the_smallest_to_the_largest():
    grad_N = torch.tensor([-1.0, 0.0, 1.0, 2.0, -1.0, 2.0])
    assert torch.equal(decoded(uniform(bitwidth=2), grad_N)[0], grad_N)


@bounded(20)
@given(st.sampled_from((1, 2, 4, 8)), st.integers(2, 200), st.integers(0, 2**32 - 1))
def test_an_element_goes_to_the_level_below_or_above_it(bitwidth, numel, seed):
    grad_N = normal(numel, seed % 1000)
    gap = float(grad_N.max() - grad_N.min()) / (2**bitwidth - 1)
    off_SN = decoded(uniform(bitwidth=bitwidth, seed=seed), grad_N, 4) - grad_N
    assert float(off_SN.abs().max()) <= gap * (1 + 1e-5)


@each("sign", [-1, 1])
def test_levels_too_near_for_float32_become_one_number_and_no_element_grows(sign):
    for elements, sent in (([-2e-38, 0.0, 3e-38], 0.0), ([2e-38, 1e-38], 1e-38)):
        off_N = decoded(uniform(bitwidth=8), sign * torch.tensor(elements))[0] - sign * sent
        assert not off_N.any()


@each("name", ["uniform", "terngrad", "qsgd"])
def test_numbers_follow_seed_tensor_and_step(name):
    grad_N = normal(500)

    def bytes_of(seed: int, tensor: str, num_steps: int) -> list[int]:
        codec = getattr(gw.compress, name)(seed=seed)
        state = codec.init(gw.TensorSpec(tensor, 500))
        for _ in range(num_steps):
            payload, state = codec.encode(state, grad_N)
        return payload.buffer.tolist()

    first = bytes_of(0, "a", 1)
    assert first == bytes_of(0, "a", 1)
    assert first != bytes_of(1, "a", 1)
    assert first != bytes_of(0, "b", 1)
    assert first != bytes_of(0, "a", 2)
