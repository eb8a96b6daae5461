"""Sparsifiers: which elements they send, how many, and densities that are none."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.contract.registry import load, names
from gradwire.errors import InvalidSetting
from gradwire_lab.compress.dgc import dgc
from gradwire_lab.compress.graddrop import graddrop
from gradwire_lab.compress.sparseloco import CHUNK, sparseloco
from tests.each import each

# ---- dgc and graddrop ----------------------------------------------------------------


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
    return torch.randn(numel, generator=draw) * torch.exp(
        torch.randn(numel, generator=draw) * 2
    )


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
    # 65 of 6400: spread 12.5 %, of 200 calls 0.9 %
    assert abs(sum(found) / 200 - 203) < 8
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


# ---- sparseloco ----------------------------------------------------------------------


def test_every_chunk_sends_its_own_largest() -> None:
    """A chunk of small elements sends as many as one of large elements, and so does the
    rest.
    """
    torch.manual_seed(0)
    grad_N = torch.randn(2 * CHUNK + 640)
    grad_N[:CHUNK] *= 1e-3
    payload, _ = sparseloco().encode(None, grad_N)
    indices_K, values_K = sparseloco().entries(payload)
    assert torch.bincount(indices_K // CHUNK).tolist() == [64, 64, 10]
    for start in (0, CHUNK, 2 * CHUNK):
        chunk_N = grad_N[start : start + CHUNK]
        mine = (indices_K >= start) & (indices_K < start + CHUNK)
        largest = chunk_N.abs().topk(int(mine.sum())).indices.sort().values + start
        assert torch.equal(indices_K[mine].long(), largest)
        sizes = grad_N[largest].abs().double()
        is_high = sizes > sizes.mean()
        want = torch.where(is_high, sizes[is_high].mean(), sizes[~is_high].mean())
        want = (want * grad_N[largest].sign()).float()
        torch.testing.assert_close(values_K[mine], want, rtol=2**-7, atol=0)
        assert bool((values_K[mine].abs() <= want.abs()).all())


def test_all_elements_of_a_chunk_need_no_places() -> None:
    grad_N = torch.randn(2 * CHUNK + 640, generator=torch.manual_seed(0))
    codec = sparseloco(density=1.0)
    payload, _ = codec.encode(None, grad_N)
    assert payload.size_bytes == 3 * 4 + grad_N.numel() // 4
    sent_N = codec.decode(payload, torch.empty_like(grad_N))
    assert torch.equal(sent_N.sign(), grad_N.sign())
    assert float((sent_N - grad_N).norm()) < 0.5 * float(grad_N.norm())


# ---- demo ----------------------------------------------------------------------------


def test_a_wave_takes_one_coefficient() -> None:
    """Along both sides of a chunk: whatever is a product of cosines is one
    coefficient.
    """
    at = (torch.arange(64) + 0.5) * torch.pi / 64
    grad_N = torch.outer(torch.cos(3 * at), torch.cos(5 * at)).flatten()
    codec = gw.compress.demo(keep=1, values=torch.float32)
    payload, _ = codec.encode(None, grad_N)
    assert torch.allclose(codec.decode(payload, torch.empty(4096)), grad_N, atol=1e-5)


# ---- settings ------------------------------------------------------------------------

SHARES = [
    (name, field.name)
    for name in names("compress")
    for field in fields(load("compress", name))
    if field.name in ("density", "sample_share", "max_density")
]


@each("name, setting", SHARES)
def test_what_is_no_share_is_refused(name: str, setting: str) -> None:
    for given in (0, -0.1, 1.5, 50, float("nan"), "1%", None, True):
        with pytest.raises(InvalidSetting, match=f"{name} {setting} must be"):
            load("compress", name)(**{setting: given})
    # at least an element of a chunk
    least = 1 / CHUNK if name == "sparseloco" else 1e-12
    for given in (1, 1.0, least):
        load("compress", name)(**{setting: given})


def test_most_sparsifiers_have_a_density() -> None:
    assert {"topk", "deft", "dgc", "randomk", "sparseloco"} <= {
        name for name, _ in SHARES
    }
