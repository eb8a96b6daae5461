"""onebit: the numbers its papers and its docstring promise."""

from __future__ import annotations

import torch

import gradwire as gw


def decoded(codec: gw.Compressor, grad_N: torch.Tensor) -> torch.Tensor:
    payload, _ = codec.encode(None, grad_N)
    return codec.decode(payload, torch.empty(grad_N.numel()))


def test_each_side_decodes_to_its_mean() -> None:
    """Seide et al. 2014, section 3.2: the two reconstruction values are the means of the sides."""
    back_N = decoded(gw.compress.onebit(stretch=1), torch.tensor([-1.0, -3.0, 2.0, 4.0]))
    assert back_N.tolist() == [-2, -2, 3, 3]


def test_bit_i_of_byte_j_is_element_8j_plus_i() -> None:
    grad_N = -torch.ones(11)
    grad_N[[0, 3, 9]] = 1.0
    payload, _ = gw.compress.onebit().encode(None, grad_N)
    assert payload["bits"].tolist() == [0b00001001, 0b00000010]


def test_blocks_have_means_of_their_own() -> None:
    grad_N = torch.cat([torch.full((64,), 1.0), torch.full((64,), 5.0), torch.full((3,), -2.0)])
    codec = gw.compress.onebit(stretch=1, block=64)
    payload, _ = codec.encode(None, grad_N)
    assert payload["low"].tolist() == [0, 0, -2]
    assert payload["high"].tolist() == [1, 5, 0]
    assert torch.equal(decoded(codec, grad_N), grad_N)


def test_inf_spoils_its_own_side_of_its_own_block_only() -> None:
    grad_N = torch.ones(192)
    grad_N[70], grad_N[71] = float("inf"), -3.0
    residual_N = torch.full((192,), 0.5)
    codec = gw.compress.onebit(stretch=1, block=64)
    payload, _ = codec.encode(None, grad_N, residual_N=residual_N)
    spoiled_N = codec.decode(payload, torch.empty(192)).isinf()
    assert spoiled_N.nonzero().flatten().tolist() == [i for i in range(64, 128) if i != 71]
    assert residual_N[64:71].tolist() == [0.5] * 7  # kept: what inf stood for is not known
    assert residual_N[71] == 0
