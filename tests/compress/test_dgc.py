"""dgc and graddrop: which elements they send, and how far the density may miss."""

from __future__ import annotations

import torch
from torch import Tensor

import gradwire as gw
from gradwire.compress.dgc import dgc
from gradwire_lab.compress.graddrop import graddrop
from tests.each import each


def numbers_sent(codec: gw.Compressor, grad_N: Tensor, num_steps: int) -> list[int]:
    """How many elements are sent in each step; checks that they are the largest."""
    state, found = codec.init(gw.TensorSpec("gradient", grad_N.numel())), []
    order_N = grad_N.abs().argsort(descending=True)
    for _ in range(num_steps):
        payload, state = codec.encode(state, grad_N)
        found.append(payload["indices"].numel())
        largest = order_N[: found[-1]].sort().values
        assert torch.equal(payload["indices"].long(), largest)
        assert torch.equal(payload["values"], grad_N[largest])
    return found


def heavy_tailed(numel: int) -> Tensor:
    draw = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=draw) * torch.exp(torch.randn(numel, generator=draw) * 2)


@each("density", [0.01, 0.1])
def test_the_density_misses_by_half_at_most(density: float) -> None:
    grad_N = heavy_tailed(20_000)
    expected = density * 20_000
    found = numbers_sent(dgc(density=density), grad_N, 200)
    assert expected / 2 < min(found) < expected
    cut = sum(number == expected for number in found)
    assert max(found) == expected
    assert 50 < cut < 150, "the threshold is not that of the density"


def test_graddrop_sends_what_passes_up_to_twice_the_density() -> None:
    grad_N = heavy_tailed(20_000)
    found = numbers_sent(graddrop(density=0.01), grad_N, 200)
    assert 100 < min(found) < 200 < max(found) <= 400
    assert abs(sum(found) / 200 - 203) < 8  # 65 of 6400: spread 12.5 %, of 200 calls 0.9 %
    flat_N = torch.full((10_000,), 2.0)
    assert numbers_sent_of(graddrop(), flat_N) == list(range(200))
    assert graddrop().typical(gw.TensorSpec("", 10_000)).size_bytes == 800


def numbers_sent_of(codec: gw.Compressor, grad_N: Tensor) -> list[int]:
    found: list[int] = codec.encode(None, grad_N)[0]["indices"].tolist()
    return found


def test_dgc_selects_exactly_where_too_many_pass() -> None:
    """A constant gradient passes as a whole."""
    assert numbers_sent_of(dgc(), torch.full((10_000,), -2.0)) == list(range(100))
    steps_N = torch.arange(10_000.0).floor_divide(5000)  # zeros, then ones
    assert numbers_sent_of(dgc(), steps_N) == list(range(5000, 5100))
