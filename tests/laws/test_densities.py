"""Every sparsifier takes as much as it was asked for, as exactly as it says; the law
bites.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.compress.topk import topk
from gradwire.contract.registry import examples
from gradwire_lab.compress._threshold import Estimated
from gradwire_lab.compress.hardthreshold import hardthreshold
from gradwire_lab.laws.densities import (
    KINDS,
    UNKIND,
    drawn,
    has_density,
    law_density_range_is_stated,
    law_no_less_than_stated,
    law_no_more_than_stated,
)
from tests.each import by_file, each
from tests.laws.cases import name_of
from tests.strategies import bounded

# ---- deliberately wrong ones ---------------------------------------------------------


class states_nothing(topk):
    """Has a density, and does not say how far it may be missed."""

    traits = replace(topk.traits, density_range=None)


class states_one_without_a_density(hardthreshold):
    """Says how far a density may be missed that nobody can ask for."""

    traits = replace(hardthreshold.traits, density_range=(0.0, 1.0))


class states_it_in_percent(topk):
    """A range that does not hold the density itself."""

    traits = replace(topk.traits, density_range=(90.0, 110.0))


class takes_half(topk):
    """Takes half of what it was asked for, and says it is exact."""

    def kept(self, numel: int) -> int:
        return -(-super().kept(numel) // 2)


class takes_double(topk):
    """Takes twice what it was asked for, and says it is exact."""

    def kept(self, numel: int) -> int:
        return min(numel, 2 * super().kept(numel))


@dataclass(frozen=True, kw_only=True)
class believes_in_normals(hardthreshold):
    """A threshold that is right for standard normal gradients of 1 %, and only for
    them.
    """

    density: float = 0.01
    threshold: float = 2.576
    traits = replace(hardthreshold.traits, density_range=(0.5, 2.0))


# ---- tests ---------------------------------------------------------------------------

SPARSIFIERS = tuple(
    dict.fromkeys(
        replace(made, density=0.01)
        for made in examples("compress")
        if has_density(made)
    )
)
"""Once each, whatever densities the examples have: the laws try their own."""
DENSITIES = (0.1, 0.01, 0.001)
ASKED = (
    (100, 0.1),
    (100, 0.001),
    (20_000, 0.1),
    (20_000, 0.01),
    (100_003, 0.01),
    (100_003, 0.001),
)
"""Sizes and densities: of one element and many, with a threshold's sample whole and
drawn.
"""


@each("algorithm", examples("compress"))
def test_range_is_stated(algorithm: Any) -> None:
    law_density_range_is_stated(algorithm)


@by_file(SPARSIFIERS)
def test_density_is_within_its_range(
    subtests: pytest.Subtests, places: list[int]
) -> None:
    for place, (turn, kind) in product(places, enumerate([*KINDS, *UNKIND])):
        with subtests.test(f"{SPARSIFIERS[place]!r} on {kind}"):
            for numel, density in ASKED[(place + turn) % 2 :: 2]:
                law_no_more_than_stated(SPARSIFIERS[place], density, drawn(kind, numel))
                law_no_less_than_stated(SPARSIFIERS[place], density, drawn(kind, numel))


@each("algorithm", SPARSIFIERS)
def test_no_gradient_is_sent_whole(algorithm: Any) -> None:
    """Ties, one value, a spike, nothing at all: no threshold is right, and memory is
    bounded.
    """
    spike_N = torch.zeros(5_000)
    spike_N[77] = 3.0
    bounded_N = torch.rand(5_000, generator=torch.Generator().manual_seed(0)) + 1.0
    near_N = 1 + 1e-4 * drawn("normal", 5_000)
    hostile = (
        drawn("normal", 5_000).round(),
        torch.ones(5_000),
        spike_N,
        bounded_N,
        near_N,
    )
    for grad_N in (*hostile, torch.zeros(5_000), torch.ones(1)):
        for density in DENSITIES:
            law_no_more_than_stated(algorithm, density, grad_N)
            law_no_less_than_stated(algorithm, density, grad_N)


ESTIMATORS = tuple(made for made in SPARSIFIERS if isinstance(made, Estimated))


@pytest.mark.slow
@each("algorithm", ESTIMATORS)
def test_estimators_are_within_their_range_whatever_the_gradient(
    algorithm: Estimated,
) -> None:
    """Of any number of elements, asked for at any cap: what passes is counted, not
    believed.
    """

    @given(
        st.integers(1, 3000),
        st.floats(1e-3, 1.0),
        st.sampled_from((1.0, 1.2, 2.0, 50.0)),
        st.lists(
            st.tuples(st.integers(-30, 30), st.integers(0, 3)), min_size=1, max_size=4
        ),
        st.sampled_from((torch.float32, torch.float64, torch.bfloat16)),
        st.integers(0, 2**16),
    )
    @bounded(60)
    def check(numel, density, cap, scales, dtype, seed) -> None:  # type: ignore[no-untyped-def]
        draw = torch.Generator().manual_seed(seed)
        spread_N = torch.randn(numel, generator=draw, dtype=torch.float64)
        powers = torch.tensor(
            [[10.0**scale, 8.0**-spread] for scale, spread in scales]
        ).double()
        scale_N, spread_of_N = powers[
            torch.randint(len(scales), (numel,), generator=draw)
        ].T
        grad_N = (scale_N * (1 + spread_of_N * spread_N)).to(dtype)
        codec = replace(algorithm, density=density, cap=cap)
        asked = max(1, round(density * numel))
        least, most = codec.traits.density_range
        payload, _ = codec.encode(None, grad_N)
        taken = payload["indices"].numel()
        possible = min(asked, int((grad_N != 0).sum()))
        assert least * possible <= taken <= max(1, most * density * numel + 0.5)

    check()


@each("algorithm", ESTIMATORS)
def test_residuals_do_not_starve_an_estimator(algorithm: Estimated) -> None:
    """The same few rows are large in every step: the others wait, and the fit sees them
    wait.
    """
    grad_N, codec = drawn("few classes", 50_000), replace(algorithm, density=0.01)
    least, most = codec.traits.density_range
    residual_N = torch.zeros_like(grad_N)
    for _ in range(5):
        payload, _ = codec.encode(None, grad_N, residual_N=residual_N)
        assert least * 500 <= payload["indices"].numel() <= most * 500


@each(
    "specimen",
    [
        states_nothing(),
        states_one_without_a_density(),
        states_it_in_percent(),
    ],
)
def test_law_of_statements_bites(specimen: Any) -> None:
    with pytest.raises(AssertionError, match="density"):
        law_density_range_is_stated(specimen)


@each(
    "law, specimen, kind",
    [
        (law_no_less_than_stated, takes_half(), "normal"),
        (law_no_more_than_stated, takes_double(), "sparse"),
        (law_no_more_than_stated, believes_in_normals(), "heavy-tailed"),
        (law_no_less_than_stated, believes_in_normals(), "sparse"),
        (law_no_less_than_stated, believes_in_normals(), "few classes"),
        (law_no_more_than_stated, believes_in_normals(), "cauchy"),
    ],
    ids=name_of,
)
def test_laws_of_densities_bite(
    law: Callable[..., None], specimen: Any, kind: str
) -> None:
    with pytest.raises(AssertionError, match="times as many"):
        law(specimen, 0.01, drawn(kind, 20_000))


def test_what_the_broken_believe_is_true_of_normals() -> None:
    """So what is rejected above is the gradient's kind, and not how specimens are
    made.
    """
    for law in (law_no_more_than_stated, law_no_less_than_stated):
        law(believes_in_normals(), 0.01, drawn("normal", 20_000))
