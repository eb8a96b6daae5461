"""Quantisers: the numbers that their papers and docstrings promise, and the ends of
float32.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gradwire as gw
from gradwire.contract import Compressor
from tests.each import each
from tests.strategies import bounded

fp8, int8, onebit = gw.compress.fp8, gw.compress.int8, gw.compress.onebit
qsgd, terngrad, uniform = gw.compress.qsgd, gw.compress.terngrad, gw.compress.uniform


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


# ---- uniform -------------------------------------------------------------------------


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


LEAST = 2.0**-149
"""The least float32 above 0."""


@each("codec", [uniform(), uniform(bitwidth=8), qsgd(), terngrad(clip=None)], ids=repr)
@each("top", [1, 20, 1000, 2**22, 2**30])
def test_levels_reach_the_largest_element_however_small(codec, top):
    grad_N = torch.tensor([-1.0, 0.0, 1.0]) * (top * LEAST)
    sent_SN = decoded(codec, grad_N, 50).double() / LEAST
    for sign, place in ((-1, 0), (1, 2)):
        most = float((sign * sent_SN[:, place]).max())
        assert top * (1 - 1e-6) <= most <= 1.3 * top + 1


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


# ---- onebit --------------------------------------------------------------------------


def test_each_side_decodes_to_its_mean() -> None:
    """Seide et al. 2014, section 3.2: the two reconstruction values are the means of
    the sides.
    """
    back_N = decoded(onebit(stretch=1), torch.tensor([-1.0, -3.0, 2.0, 4.0]))[0]
    assert back_N.tolist() == [-2, -2, 3, 3]


def test_bit_i_of_byte_j_is_element_8j_plus_i() -> None:
    grad_N = -torch.ones(11)
    grad_N[[0, 3, 9]] = 1.0
    payload, _ = onebit().encode(None, grad_N)
    assert payload["bits"].tolist() == [0b00001001, 0b00000010]


def test_blocks_have_means_of_their_own() -> None:
    grad_N = torch.cat(
        [torch.full((64,), 1.0), torch.full((64,), 5.0), torch.full((3,), -2.0)]
    )
    codec = onebit(stretch=1, block=64)
    payload, _ = codec.encode(None, grad_N)
    assert payload["low"].tolist() == [0, 0, -2]
    assert payload["high"].tolist() == [1, 5, 0]
    assert torch.equal(decoded(codec, grad_N)[0], grad_N)


def test_inf_spoils_its_own_side_of_its_own_block_only() -> None:
    grad_N = torch.ones(192)
    grad_N[70], grad_N[71] = float("inf"), -3.0
    residual_N = torch.full((192,), 0.5)
    codec = onebit(stretch=1, block=64)
    payload, _ = codec.encode(None, grad_N, residual_N=residual_N)
    spoiled_N = codec.decode(payload, torch.empty(192)).isinf()
    assert spoiled_N.nonzero().flatten().tolist() == [
        i for i in range(64, 128) if i != 71
    ]
    # kept: what inf stood for is not known
    assert residual_N[64:71].tolist() == [0.5] * 7
    assert residual_N[71] == 0


# ---- terngrad ------------------------------------------------------------------------


def test_three_values_and_the_largest_is_always_sent():
    grad_N = normal(1000)
    sent_N = decoded(terngrad(clip=None, block=16384), grad_N)[0]
    top = float(grad_N.abs().max())
    assert set(sent_N.tolist()) <= {-top, 0.0, top}
    place = int(grad_N.abs().argmax())
    assert sent_N[place] == grad_N[place]
    nonzero = sent_N != 0
    assert torch.equal(sent_N[nonzero].sign(), grad_N[nonzero].sign())


def test_clipping_cuts_at_so_many_deviations():
    """Section 3.3: g becomes sign(g) * c * sigma where it is larger; the rest is as
    before.
    """
    grad_N = normal(10_000)
    limit = 2.5 * float(grad_N.double().square().mean().sqrt())
    sent_N = decoded(terngrad(clip=2.5, block=16384), grad_N)[0]
    top = float(sent_N.max())
    assert top == pytest.approx(limit, rel=1e-6)
    beyond = grad_N.abs() > limit
    assert int(beyond.sum()) > 50
    assert torch.equal(sent_N[beyond], grad_N[beyond].sign() * top)


def test_clipping_costs_unbiasedness():
    assert terngrad.traits.unbiased
    assert terngrad(clip=None).traits.unbiased
    assert not terngrad().traits.unbiased


# ---- qsgd ----------------------------------------------------------------------------


@each("bitwidth, num_levels", [(2, 1), (4, 7), (8, 127)])
def test_variance_and_density_are_within_their_bounds(bitwidth, num_levels):
    """Lemma 3.1: E|Q - v|^2 <= min(n/s^2, sqrt(n)/s) |v|^2, and E|Q|_0 <= s (s + sqrt
    n).
    """
    grad_N = normal(512)
    sent_SN = decoded(qsgd(bitwidth=bitwidth, norm="l2"), grad_N, 200)
    variance = float((sent_SN - grad_N).square().sum(1).mean() / grad_N.square().sum())
    assert variance <= min(512 / num_levels**2, math.sqrt(512) / num_levels) * 1.05
    num_sent = float((sent_SN != 0).float().sum(1).mean())
    assert num_sent <= num_levels * (num_levels + math.sqrt(512)) * 1.05


def test_levels_are_multiples_of_the_norm_with_a_sign():
    grad_N = torch.tensor([3.0, -4.0])
    levels = decoded(qsgd(bitwidth=4, norm="l2"), grad_N, 50) / (5 / 7)
    assert torch.allclose(levels, levels.round(), atol=1e-5)
    assert set(levels[:, 0].round().tolist()) == {4, 5}  # 3 / 5 * 7 = 4.2
    assert set(levels[:, 1].round().tolist()) == {-5, -6}


@each("size", [1e-36, 1e-25, 1e25, 3e38])
@each("norm", ["l2", "max"])
def test_a_norm_outside_float32_is_replaced_by_the_largest_magnitude(size, norm):
    grad_N = torch.tensor([size, -size, 0.0])
    sent_N = decoded(qsgd(norm=norm), grad_N)[0]
    assert torch.allclose(sent_N / size, grad_N / size, rtol=1e-5, atol=0)


# ---- int8 ----------------------------------------------------------------------------


def test_every_element_goes_to_the_nearest_level():
    grad_N = normal(5000)
    step = float(grad_N.abs().max()) / 127
    sent_N = decoded(int8(block=8192), grad_N)[0]
    assert float((sent_N - grad_N).abs().max()) <= step / 2 * (1 + 1e-5)
    assert float(sent_N.abs().max()) == pytest.approx(127 * step, rel=1e-6)


@each("kind", [int8, fp8])
@each("bad", [math.nan, math.inf])
def test_what_is_not_finite_spoils_its_own_block_only(kind, bad):
    grad_N = torch.ones(128)
    grad_N[70] = bad
    sent_N = decoded(kind(block=64), grad_N)[0]
    assert bool(sent_N[:64].isfinite().all())
    assert not bool(sent_N[70].isfinite())


@each("kind", [int8, fp8])
@each("size", [0.0, 1e-44, 1e-38, 3.4e38])
def test_no_magnitude_grows(kind, size):
    sent_N = decoded(kind(), torch.tensor([size, -size, 0.0]))[0]
    assert bool((sent_N.abs() <= size * (1 + 1e-6)).all())
    assert sent_N[2] == 0


# ---- fp8 -----------------------------------------------------------------------------


def test_four_bits_of_precision_down_to_a_28672th_of_the_largest():
    """Three bits of fraction: half a last place is 1/16 of the number below; 448 / 2^-6
    = 28672.
    """
    grad_N = torch.logspace(0, math.log10(28672), 1000).flip(0)
    sent_N = decoded(fp8(), grad_N)[0]
    assert float((sent_N / grad_N - 1).abs().max()) <= 1 / 16 + 1e-6
    assert sent_N[0] == pytest.approx(28672)


def test_small_elements_beside_a_large_one_survive_as_in_no_int8():
    grad_N = torch.cat([torch.tensor([1000.0]), normal(4000)])
    assert float((decoded(int8(), grad_N)[0] != 0).float().mean()) < 0.01
    assert float((decoded(fp8(), grad_N)[0] != 0).float().mean()) > 0.99
