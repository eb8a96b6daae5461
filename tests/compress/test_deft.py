"""deft as a whole: the paper's algorithm written out, and its settings.

The parts have ``test_deft_parts.py``; what it has in common with others is in ``test_support.py``.
"""

from __future__ import annotations

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
