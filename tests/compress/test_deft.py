"""deft as a whole: the paper's algorithm written out, its density among many ranks, its settings.

The parts have ``test_deft_parts.py``; what it has in common with others is in ``test_support.py``.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.compress.deft import layer_k, owners
from gradwire.exchange.by_name import exchange_for
from tests.compress.test_support import MODEL, Run, draw, spec_of
from tests.each import each

deft, topk = gw.compress.deft, gw.compress.topk


def by_the_paper(
    exchange: deft, spec: gw.TensorSpec, pending: list[Tensor], step: int
) -> list[int]:
    """The support by algorithms 2 to 5, one layer and rank after the other."""
    world = len(pending)
    layers, budget = exchange.partition(spec, world), exchange.kept(spec.numel)
    parts = [torch.split(c_N, list(layers.sizes)) for c_N in pending]
    k = [
        layer_k(torch.stack([p.double().norm() for p in own]), layers.sizes_L, budget)
        for own in parts
    ]
    owner = owners(layers, k[step % world], world, step % world).tolist()
    support: list[int] = []
    for layer, (start, size) in enumerate(zip(layers.starts_L.tolist(), layers.sizes, strict=True)):
        rank = owner[layer]
        if rank == world:
            chosen = torch.arange(size)
        else:
            chosen = parts[rank][layer].abs().topk(int(k[rank][layer])).indices
        support += sorted((chosen + start).tolist())
    return support


@each("world", [2, 3, 5])
def test_it_is_the_papers_algorithm(world: int) -> None:
    """Over steps, so with every rank as the delegate, and with a residual."""
    spec, exchange = spec_of(MODEL, torch.float64), deft(density=0.1)
    run = Run(exchange_for(exchange), spec, world)
    left = [torch.zeros(spec.numel, dtype=torch.float64) for _ in range(world)]
    for step in range(world + 1):
        grads = draw(spec, world, step)
        pending = [c_N + g_N for c_N, g_N in zip(left, grads, strict=True)]
        support = by_the_paper(exchange, spec, pending, step)
        want_N = torch.zeros(spec.numel, dtype=torch.float64)
        want_N[support] = torch.stack(pending).mean(0)[support]
        torch.testing.assert_close(run.step(grads), want_N, rtol=1e-12, atol=1e-12)
        for c_N, state in zip(pending, run.states, strict=True):
            c_N[support] = 0.0
            torch.testing.assert_close(state.residual_N, c_N, rtol=1e-12, atol=1e-12)
        left = pending


def test_layers_may_be_given() -> None:
    sizes = (30, 2, 8)
    by_sizes = Run(deft(density=0.2, layers=[*sizes]), gw.TensorSpec("flat", 40), 3)
    by_shapes = Run(deft(density=0.2), spec_of(tuple((n,) for n in sizes)), 3)
    grads = draw(gw.TensorSpec("flat", 40), 3)
    assert torch.equal(by_sizes.step(grads), by_shapes.step(grads))
    assert hash(deft(layers=[*sizes])) == hash(deft(layers=sizes))
    with pytest.raises(gw.InvalidSetting, match=r"sizes of 41 elements in all, as 'flat' has, got"):
        deft(layers=sizes).init(gw.TensorSpec("flat", 41), 2)
    for wrong in ((-1, 41), (1.5,), (True,), "40", 40):
        with pytest.raises(gw.InvalidSetting, match="deft layers must be numbers of elements"):
            deft(layers=wrong)  # type: ignore[arg-type]


def correlated(spec: gw.TensorSpec, world: int, seed: int) -> list[Tensor]:
    """Gradients of one model on other data: half shared, of another size in each layer."""
    layers = torch.rand(len(spec.shapes), generator=torch.Generator().manual_seed(0))
    scales_N = (100**layers).repeat_interleave(torch.tensor([a * b for a, b in spec.shapes]))
    generator = torch.Generator().manual_seed(seed)
    shared_N, *own = (torch.randn(spec.numel, generator=generator) for _ in range(world + 1))
    return [scales_N * (shared_N + own_N) for own_N in own]


@each("density, within, growth", [(0.02, 0.04, 3), (0.1, 0.06, 2)], ids=str)
def test_the_density_stays_whatever_the_number_of_ranks_and_top_ks_grows(
    density: float, within: float, growth: float
) -> None:
    """Figure 4, in small: near what was asked for among 2 to 16 ranks, in every step."""
    spec = spec_of(((40, 50), (100, 30), (20, 20), (70, 60), (25, 8)) * 3)
    grown = []
    for world in (2, 4, 8, 16):
        mine, other = (
            Run(exchange_for(kind(density=density)), spec, world) for kind in (deft, topk)
        )
        for step in range(3):
            grads = correlated(spec, world, step)
            assert int(mine.step(grads).count_nonzero()) == pytest.approx(
                density * spec.numel, rel=within
            )
            built_up = int(other.step(grads).count_nonzero())
        grown.append(built_up / (density * spec.numel))
    assert all(a < b for a, b in pairwise(grown))
    assert grown[-1] > growth
