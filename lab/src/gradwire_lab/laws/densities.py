"""The law of densities: what a sparsifier takes misses what was asked by no more than
it states.

``Traits.density_range`` is the statement. It is held to by codecs, by what they send,
and by exchanges with a shared support, by what arrives in the mean: there all ranks
take the same.
"""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.contract import Compressor, Member, Traits
from gradwire.contract.spec import TensorSpec

from ..errors import LawBroken
from .cases import stepped
from .tolerance import must

KINDS = ("normal", "laplace", "heavy-tailed", "sparse")
UNKIND = ("cauchy", "lognormal", "shifted", "few classes")
"""Kinds of gradients that no fitted distribution resembles; the laws hold for them as
well.
"""
WORLD = 2
NUM_CLASSES = 1000
LEAST_ASKED = 64
"""The fewest elements asked for at which the least of a density range is held to."""


def drawn(kind: str, numel: int, seed: int = 0) -> Tensor:
    """A gradient of a kind; heavy-tailed is Student's t with 3 degrees of freedom."""
    draw = torch.Generator().manual_seed(seed)
    if kind == "few classes":
        return few_classes(numel, draw)
    normal_N = torch.randn(numel, generator=draw)
    if kind == "laplace":
        return (
            normal_N.sign() * -torch.rand(numel, generator=draw).clamp_min(1e-30).log()
        )
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
    """The gradient of a linear layer of 1000 classes behind ReLU, from a batch with
    three of them.

    The rows of these three hold nearly all of it, and every other row much the same
    little.
    """
    width = -(-numel // NUM_CLASSES)
    batch = 32
    behind_relu = torch.randn(batch, width, generator=draw).relu()
    weight = torch.empty(NUM_CLASSES, width).normal_(std=width**-0.5, generator=draw)
    weight.requires_grad_()
    labels = torch.tensor([5, 50, 95])[torch.arange(batch) % 3]
    loss = torch.nn.functional.cross_entropy(behind_relu @ weight.T, labels)
    (grad,) = torch.autograd.grad(loss, weight)
    return grad.flatten()[:numel]


def has_density(algorithm: Any) -> bool:
    """Whether the user asks for a density."""
    return is_dataclass(algorithm) and any(
        part.name == "density" for part in fields(algorithm)
    )


def law_density_range_is_stated(algorithm: Any) -> None:
    """``Traits.density_range`` is stated by what has a setting ``density``, and by
    nothing else.

    To do: declare density_range=(least, most) in the traits, with least <= 1 <= most.
    """
    stated = _range(algorithm)
    must(
        (stated is not None) == has_density(algorithm),
        f"density_range is {stated} "
        f"with{'' if has_density(algorithm) else 'out'} a density",
    )
    if stated is not None:
        must(
            0 <= stated[0] <= 1 <= stated[1],
            f"{stated} does not hold the density asked for",
        )


def law_no_more_than_stated(algorithm: Any, density: float, grad_N: Tensor) -> bool:
    """No gradient at all has more taken of it than was stated, so that memory is
    bounded.

    But for whole elements: one, or one of each layer, of which a vector has as many as
        ranks.

    To do: cap what passes a threshold at most * density * numel elements, or state a
    wider density_range.
    """
    stated = _range(algorithm)
    if stated is None:
        return False
    _, most = stated
    asked = density * grad_N.numel()
    taken = _taken(algorithm, density, grad_N)
    floor = 1 if isinstance(algorithm, Compressor) else WORLD
    must(
        taken <= max(floor, most * asked + 0.5),
        f"took {taken} of {asked:.1f} asked for: more than {most} times as many",
    )
    return True


def law_no_less_than_stated(algorithm: Any, density: float, grad_N: Tensor) -> bool:
    """Every gradient has as many elements taken as was stated, or all that are not 0 if
    fewer.

    To do: count what passes a threshold and choose again where it is too few, or state
    a wider density_range.
    """
    asked = density * grad_N.numel()
    stated = _range(algorithm)
    if stated is None or asked < LEAST_ASKED:
        return False
    least, _ = stated
    possible = min(asked, int((grad_N != 0).sum()))
    taken = _taken(algorithm, density, grad_N)
    must(
        taken >= least * possible - 0.5,
        f"took {taken} of {possible:.1f} that it could: fewer than {least} times "
        "as many",
    )
    return True


def _range(algorithm: Any) -> tuple[float, float] | None:
    """The density range that is stated, if any; an exchange may declare no traits at
    all.
    """
    traits: Traits | None = algorithm.traits
    if traits is None:
        return None
    return traits.density_range


def _taken(algorithm: Any, density: float, grad_N: Tensor) -> int:
    algorithm = replace(algorithm, density=density)
    spec = TensorSpec("gradient", grad_N.numel(), grad_N.dtype)
    if isinstance(algorithm, Compressor):
        payload, _ = algorithm.encode(algorithm.init(spec), grad_N)
        return int(algorithm.entries(payload)[0].numel())
    members = [Member(rank, WORLD) for rank in range(WORLD)]
    states = [algorithm.init(spec, WORLD) for _ in members]
    outs = [torch.empty_like(grad_N) for _ in members]
    stepped(algorithm, members, states, [grad_N] * WORLD, 0, outs)
    selection = members[0].selection
    if selection is None:
        raise LawBroken("the exchange does not say how many elements it selected")
    return selection.arrived
