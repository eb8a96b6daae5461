"""Definitions 1 to 5 against their words."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.planning.data.sparsity import (
    DOUBLINGS,
    Indices,
    UnitSparsity,
)
from gradwire_lab.exchange.sparse_schemes import range_imbalance, skew
from gradwire_lab.planning.index_sets import (
    _appearances,
    _densification,
    unit_sparsity,
)
from tests.strategies import bounded

NUM_UNITS = 40
index_sets = st.sets(st.integers(0, NUM_UNITS - 1)).map(
    lambda found: np.array(sorted(found), dtype=np.int32)
)


def densification_ratio(sets: list[Indices], num_ranks: int) -> float:
    return _densification(_appearances(sets), len(sets), num_ranks)


several = st.lists(index_sets, min_size=1, max_size=5)


@bounded(40)
@given(sets=several)
def test_densification_is_the_mean_over_all_subsets(sets: list[Indices]) -> None:
    mean = sum(map(len, sets)) / len(sets)
    for ranks in range(1, len(sets) + 1):
        unions = [
            len(set().union(*map(set, chosen))) for chosen in combinations(sets, ranks)
        ]
        expected = sum(unions) / len(unions) / mean if mean else 1.0
        assert densification_ratio(sets, ranks) == pytest.approx(expected)


@pytest.mark.smoke
@bounded(15)
@given(sets=st.lists(index_sets, min_size=2, max_size=9))
def test_all_figures_are_possible_ones(sets: list[Indices]) -> None:
    """The validators hold for whatever was measured; so do the lookups between what is
    kept.
    """
    found = unit_sparsity(sets, 3, NUM_UNITS)
    ranks = (1, 2, 3, 5, 8, 100, 128, 200)
    ratios = [found.gamma(number) for number in ranks]
    assert ratios == sorted(ratios)
    for number, ratio in zip(ranks, ratios, strict=True):
        assert 1 <= ratio <= number
        assert ratio * found.density <= 1 + 1e-6
    assert found.gamma(2) == pytest.approx(densification_ratio(sets, 2))
    assert found.is_extrapolated(16)
    assert not found.is_extrapolated(2)
    assert [one.ranks for one in found.densification] == list(DOUBLINGS)
    assert UnitSparsity.model_validate_json(found.model_dump_json()) == found


def test_imbalances_of_push_and_pull_are_those_of_ranges() -> None:
    found = unit_sparsity([np.array([0, 1]), np.array([0, 3])], 1, 4)
    assert range_imbalance(found, 1) == (1.0, 1.0)
    assert range_imbalance(found, 2) == (
        1.5,
        pytest.approx(4 / 3),
    )  # 3 of 4 pushed, 2 of 3 held by the first
    # not measured: they grow as the skewness ratio does, up to 4
    push, pull = range_imbalance(found, 4)
    growth = skew(found, 4) / skew(found, 2)
    assert (push, pull) == pytest.approx((1.5 * growth, 4 / 3 * growth))
    assert range_imbalance(unit_sparsity([np.array([0, 1])], 1, 4), 2) == (2.0, 2.0)
    empty = unit_sparsity([np.array([], dtype=np.int64)] * 2, 1, 4)
    assert range_imbalance(empty, 2) == (1.0, 1.0)
