"""Every sparsifier takes as much as it was asked for, as exactly as it says; the law bites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from gradwire.load import examples

from . import broken_density as broken
from .cases import name_of
from .density_laws import (
    KINDS,
    drawn,
    has_density,
    law_density_range_is_stated,
    law_no_less_than_stated,
    law_no_more_than_stated,
)

SPARSIFIERS = tuple(
    dict.fromkeys(replace(made, density=0.01) for made in examples("compress") if has_density(made))
)
"""Once each, whatever densities the examples have: the laws try their own."""
SIZES = (100, 20_000, 100_003)
DENSITIES = (0.1, 0.01, 0.001)


@pytest.mark.parametrize("algorithm", examples("compress"), ids=repr)
def test_range_is_stated(algorithm: Any) -> None:
    law_density_range_is_stated(algorithm)


@pytest.mark.parametrize("algorithm", SPARSIFIERS, ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_density_is_within_its_range(algorithm: Any, kind: str) -> None:
    for numel in SIZES:
        grad_N = drawn(kind, numel)
        for density in DENSITIES:
            law_no_more_than_stated(algorithm, density, grad_N)
            law_no_less_than_stated(algorithm, density, grad_N)


@pytest.mark.parametrize("algorithm", SPARSIFIERS, ids=repr)
def test_no_gradient_is_sent_whole(algorithm: Any) -> None:
    """Ties, one value, a spike, nothing at all: no threshold is right, and memory is bounded."""
    spike_N = torch.zeros(5_000)
    spike_N[77] = 3.0
    bounded_N = torch.rand(5_000, generator=torch.Generator().manual_seed(0)) + 1.0
    hostile = (drawn("normal", 5_000).round(), torch.ones(5_000), spike_N, bounded_N)
    for grad_N in (*hostile, torch.zeros(5_000), torch.ones(1)):
        for density in DENSITIES:
            law_no_more_than_stated(algorithm, density, grad_N)


@pytest.mark.parametrize(
    "specimen",
    [
        broken.states_nothing(),
        broken.states_one_without_a_density(),
        broken.states_it_in_percent(),
    ],
    ids=repr,
)
def test_law_of_statements_bites(specimen: Any) -> None:
    with pytest.raises(AssertionError, match="density"):
        law_density_range_is_stated(specimen)


@pytest.mark.parametrize(
    ("law", "specimen", "kind"),
    [
        (law_no_less_than_stated, broken.takes_half(), "normal"),
        (law_no_more_than_stated, broken.takes_double(), "sparse"),
        (law_no_more_than_stated, broken.believes_in_normals(), "heavy-tailed"),
        (law_no_less_than_stated, broken.believes_in_normals(), "sparse"),
    ],
    ids=name_of,
)
def test_laws_of_densities_bite(law: Callable[..., None], specimen: Any, kind: str) -> None:
    with pytest.raises(AssertionError, match="times as many"):
        law(specimen, 0.01, drawn(kind, 20_000))


def test_what_the_broken_believe_is_true_of_normals() -> None:
    """So what is rejected above is the gradient's kind, and not how specimens are made."""
    for law in (law_no_more_than_stated, law_no_less_than_stated):
        law(broken.believes_in_normals(), 0.01, drawn("normal", 20_000))
