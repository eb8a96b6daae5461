"""Bulk synchronisation keeps its laws; wrong coordinators are rejected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire_lab.exchange.bulk import LinkTransfer, packed_rows, unpacked_rows
from tests.each import each
from tests.laws.broken_bulk import BITES
from tests.laws.bulk_laws import LAWS, Conditions
from tests.strategies import bounded


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


@bounded(50)
@given(
    rows=st.lists(
        st.tuples(*[st.integers(0, 2**bits - 1) for bits in (16, 16, 16, 32, 32)]),
        max_size=40,
    )
)
def test_what_is_told_arrives(rows: list[tuple[int, ...]]) -> None:
    data = packed_rows(rows)
    assert [*unpacked_rows(data)] == rows
    assert [*unpacked_rows(data + data)] == rows, "what lies behind does not count"


def test_transfers_of_a_layer_take_five_bytes_each() -> None:
    """A report of 100 tensors to each of seven ranks."""
    rows = [
        LinkTransfer(message, 0, dst, 100 * (message // 9))
        for message in range(100)
        for dst in range(1, 8)
    ]
    assert len(packed_rows(rows)) < 5 * len(rows)


@each("law, wrong", BITES, ids=str)
def test_wrong_ones_are_rejected(
    law: Callable[[Conditions], None], wrong: Conditions
) -> None:
    with pytest.raises(AssertionError) as caught:
        law(wrong)
    assert str(caught.value)


def test_every_law_has_a_specimen_it_must_reject() -> None:
    assert {law for law, _ in BITES} == set(LAWS)
