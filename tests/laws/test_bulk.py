"""Bulk synchronisation keeps its laws; wrong coordinators are rejected."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.each import each
from tests.laws.broken_bulk import BITES
from tests.laws.bulk_laws import LAWS, Conditions


def keep_laws(seed: int) -> None:
    for law in LAWS:
        law(Conditions(seed=seed))


@each("seed", range(7))
def test_ranks_of_every_number_keep_the_laws(seed: int) -> None:
    """Seeds draw ranks, exchanges, rules, seconds, and a rank that is late."""
    keep_laws(seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.nightly] if first >= 100 else [])
        for first in range(0, 1000, 20)
    ],
)
def test_a_thousand_random_cases_keep_the_laws(first: int) -> None:
    """A tenth of them by day."""
    for seed in range(first, first + 20):
        keep_laws(1000 + seed)


@each("law, wrong", BITES, ids=str)
def test_wrong_ones_are_rejected(
    law: Callable[[Conditions], None], wrong: Conditions
) -> None:
    with pytest.raises(AssertionError) as caught:
        law(wrong)
    assert str(caught.value)


def test_every_law_has_a_specimen_it_must_reject() -> None:
    assert {law for law, _ in BITES} == set(LAWS)
