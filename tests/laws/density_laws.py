"""The law of densities: what a sparsifier takes misses what was asked by no more than it states.

``Traits.density_range`` is the statement. It is held to by codecs, by what they send, and by
exchanges with a shared support, by what arrives in the mean: there all ranks take the same.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.collective._local import drive
from gradwire.contract import Compressor, Member
from gradwire.spec import TensorSpec

KINDS = ("normal", "laplace", "heavy-tailed", "sparse")
UNKIND = ("cauchy", "lognormal", "shifted", "few classes")
"""Gradients that no distribution that is fitted resembles; the laws hold of them as well."""
WORLD, NUM_CLASSES = 2, 1000
LEAST_ASKED = 64
"""Of fewer elements the least of the range says nothing."""


def drawn(kind: str, numel: int, seed: int = 0) -> Tensor:
    """A gradient of a kind; heavy-tailed is Student's t with 3 degrees of freedom."""
    draw = torch.Generator().manual_seed(seed)
    if kind == "few classes":
        return few_classes(numel, draw)
    normal_N = torch.randn(numel, generator=draw)
    if kind == "laplace":
        return normal_N.sign() * -torch.rand(numel, generator=draw).clamp_min(1e-30).log()
    if kind == "heavy-tailed":
        return normal_N / torch.randn(3, numel, generator=draw).square().mean(0).sqrt()
    if kind == "sparse":
        return normal_N.masked_fill(torch.rand(numel, generator=draw) < 0.9, 0.0)
    if kind == "cauchy":
        return normal_N / torch.randn(numel, generator=draw)
    if kind == "lognormal":
        return normal_N.sign() * torch.randn(numel, generator=draw).mul(3).exp()
    if kind == "shifted":
        return 1 + 0.1 * normal_N
    return normal_N


def few_classes(numel: int, draw: torch.Generator) -> Tensor:
    """That of a linear layer of 1000 classes behind ReLU, from a batch that has three of them.

    The rows of these three hold nearly all of it, and every other row much the same little.
    """
    width, batch = -(-numel // NUM_CLASSES), 32
    behind_relu = torch.randn(batch, width, generator=draw).relu()
    layer = torch.nn.Linear(width, NUM_CLASSES)
    with torch.no_grad():
        layer.weight.normal_(std=width**-0.5, generator=draw)
        layer.bias.zero_()
    labels = torch.tensor([5, 50, 95])[torch.arange(batch) % 3]
    torch.nn.functional.cross_entropy(layer(behind_relu), labels).backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.flatten()[:numel]


def has_density(algorithm: Any) -> bool:
    """Whether the user asks for a density."""
    return any(field.name == "density" for field in fields(algorithm))


def law_density_range_is_stated(algorithm: Any) -> None:
    """By whatever has a setting ``density``, and by nothing else."""
    stated = algorithm.traits.density_range
    assert (stated is not None) == has_density(algorithm), (
        f"density_range is {stated} with{'' if has_density(algorithm) else 'out'} a density"
    )
    if stated is not None:
        assert 0 <= stated[0] <= 1 <= stated[1], f"{stated} does not hold the density asked for"


def law_no_more_than_stated(algorithm: Any, density: float, grad_N: Tensor) -> None:
    """Of any gradient at all, so that memory is bounded.

    But for whole elements: one, or one of each layer, of which a vector has as many as ranks.
    """
    if algorithm.traits.density_range is None:
        return
    _, most = algorithm.traits.density_range
    asked = density * grad_N.numel()
    taken = _taken(algorithm, density, grad_N)
    floor = 1 if isinstance(algorithm, Compressor) else WORLD
    assert taken <= max(floor, most * asked + 0.5), (
        f"took {taken} of {asked:.1f} asked for: more than {most} times as many"
    )


def law_no_less_than_stated(algorithm: Any, density: float, grad_N: Tensor) -> None:
    """Of any gradient, as many as are not 0 where these are fewer."""
    asked = density * grad_N.numel()
    if algorithm.traits.density_range is None or asked < LEAST_ASKED:
        return
    least, _ = algorithm.traits.density_range
    possible = min(asked, int((grad_N != 0).sum()))
    taken = _taken(algorithm, density, grad_N)
    assert taken >= least * possible - 0.5, (
        f"took {taken} of {possible:.1f} that it could: fewer than {least} times as many"
    )


def _taken(algorithm: Any, density: float, grad_N: Tensor) -> int:
    algorithm = replace(algorithm, density=density)
    spec = TensorSpec("gradient", grad_N.numel(), grad_N.dtype)
    if isinstance(algorithm, Compressor):
        payload, _ = algorithm.encode(algorithm.init(spec), grad_N)
        return int(algorithm.entries(payload)[0].numel())
    members = [Member(rank, WORLD) for rank in range(WORLD)]
    texts = [
        algorithm.synchronise(me, algorithm.init(spec, WORLD), grad_N, torch.empty_like(grad_N))
        for me in members
    ]
    drive(texts, seed=0)
    return members[0].selection.arrived
