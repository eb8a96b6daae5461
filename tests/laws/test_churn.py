"""Partial rounds keep their laws when ranks are lost, parted or come."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradwire.compress.none import none
from gradwire.compress.onebit import onebit
from gradwire.contract import Compressor
from tests.each import each
from tests.laws.broken_churn import BITES
from tests.laws.churn_laws import HAPPENINGS, LAWS, LOSSY, Churn

WORLDS = (2, 3, 5, 6, 7)


@pytest.mark.slow
@each("world, codec", [*zip(WORLDS, (none(), LOSSY) * 3, strict=False)], ids=str)
def test_laws_hold_whatever_happens(
    world: int, codec: Compressor, subtests: pytest.Subtests
) -> None:
    for law in LAWS:
        with subtests.test(law.__name__):
            law(Churn(world=world, codec=codec, seed=world))


@pytest.mark.slow
@each("kind", HAPPENINGS)
def test_laws_hold_for_each_kind(kind: str, subtests: pytest.Subtests) -> None:
    for law in LAWS:
        with subtests.test(law.__name__):
            law(Churn(world=5, kinds=(kind,), num_happenings=2, codec=LOSSY, seed=3))


CODECS = (none(), LOSSY, onebit(block=64))


@pytest.mark.slow
@pytest.mark.parametrize(
    "turn",
    [0, *(pytest.param(turn, marks=pytest.mark.nightly) for turn in (1, 2))],
)
@each("seed", range(12))
def test_laws_hold_for_many_runs(
    seed: int, turn: int, subtests: pytest.Subtests
) -> None:
    """Each run by one of the codecs, and in the night by the others."""
    codec = CODECS[(seed + turn) % len(CODECS)]
    for law in LAWS:
        with subtests.test(law.__name__):
            happenings = 1 + seed % 4
            world = WORLDS[seed % 5]
            law(Churn(world=world, codec=codec, seed=seed, num_happenings=happenings))


@pytest.mark.slow
@each("law, wrong", BITES, ids=str)
def test_wrong_ones_are_rejected(law: Callable[[Churn], None], wrong: Churn) -> None:
    with pytest.raises(AssertionError) as caught:
        law(wrong)
    assert str(caught.value)


def test_laws_hold_where_an_owner_is_lost_or_a_network_parts() -> None:
    for law in LAWS:
        law(Churn(world=3, codec=LOSSY, seed=3, num_happenings=1))


def test_every_law_has_a_specimen_it_must_reject() -> None:
    assert {law for law, _ in BITES} == set(LAWS)
