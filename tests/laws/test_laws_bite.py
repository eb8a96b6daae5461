"""Laws must bite: each rejects the wrong specimens made for it, and accepts the sound
ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

import gradwire as gw
from gradwire.runtime.step.backup import Backup
from gradwire_lab.laws import (
    bounded,
    collectives,
    compressors,
    densities,
    exchanges,
    growth,
    many_steps,
    planners,
    programs,
    roundings,
)
from gradwire_lab.laws.cases import FEW, Case
from gradwire_lab.laws.skipped import law_what_is_not_taken_is_put_back
from gradwire_lab.laws.subjects import FEW_LONG, Verdict
from tests.each import each
from tests.laws import broken, decoupled_laws, momentum_laws
from tests.laws.broken_skips import BROKEN, job_with
from tests.strategies import panel

SMALL = [case for case in FEW if case.world <= 5]


def cases_of(law: Callable[..., Any]) -> list[Case]:
    """The cases on which a law must reject the broken, and accept the sound."""
    return [case for case in SMALL if law not in many_steps.LAWS or case in FEW_LONG]


def _ids(bites: tuple[Any, ...]) -> list[str]:
    names = []
    for law, specimen in bites:
        parts = (
            specimen,
            getattr(specimen, "collective", None),
            getattr(specimen, "codec", None),
        )
        wrong = next(p for p in parts if ".broken_" in type(p).__module__)
        names.append(f"{law.__name__}-{type(wrong).__name__}")
    return names


@contextlib.contextmanager
def rejected(by: Callable[..., None]) -> Iterator[None]:
    with pytest.raises(AssertionError) as caught:
        yield
    # pytest's own "did not raise" is not an AssertionError; an empty one would tell a
    # user nothing.
    assert str(caught.value), f"{by.__name__} rejects without saying why"


@each("law, codec", broken.COMPRESSOR_BITES, ids=_ids(broken.COMPRESSOR_BITES))
def test_compressor_law_bites(law: Callable[..., None], codec: Any) -> None:
    """The longest gradients first, which show nearly all."""
    with rejected(by=law):
        for grad_N in panel()[::-1]:
            law(codec, grad_N)


ON_EXCHANGES = broken.COLLECTIVE_BITES + broken.EXCHANGE_BITES


@each("law, exchange", ON_EXCHANGES, ids=_ids(ON_EXCHANGES))
def test_exchange_law_bites(law: Callable[..., None], exchange: Any) -> None:
    with rejected(by=law):
        for case in cases_of(law):
            law(exchange, case)


def test_every_law_has_a_specimen_it_must_reject() -> None:
    assert {law for law, _ in broken.COMPRESSOR_BITES} == set(compressors.LAWS)
    assert {law for law, _ in broken.COLLECTIVE_BITES} == set(collectives.LAWS)
    assert {law for law, _ in broken.EXCHANGE_BITES} == set(exchanges.LAWS)


@each("codec", broken.SOUND_COMPRESSORS)
def test_what_wrong_compressors_are_made_of_passes(codec: Any) -> None:
    for (i, grad_N), (j, law) in product(
        enumerate(panel()), enumerate(compressors.LAWS)
    ):
        if (i + j) % 6 == 0:
            law(codec, grad_N)


@pytest.mark.slow
@each("law", collectives.LAWS + exchanges.LAWS, ids=lambda f: f.__name__)
def test_sound_parts_of_the_broken_pass(law: Callable[..., None]) -> None:
    """So what is rejected above is the one wrong thing, not how specimens are made."""
    cases = cases_of(law)
    for turn, exchange in enumerate(broken.SOUND_EXCHANGES):
        law(exchange, cases[turn % len(cases)])


def test_bounded_law_bites() -> None:
    law = bounded.law_residuals_stay_bounded
    with rejected(by=law):
        law(broken.STARVES, FEW_LONG[0])


def test_growth_law_bites() -> None:
    law = growth.law_means_do_not_grow_over_ranks_and_steps
    with rejected(by=law):
        law(broken.GROWS, growth.MANY_RANKS[0])


@each("backup", BROKEN)
def test_the_law_of_skipped_steps_bites(backup: type[Backup]) -> None:
    # it counts draws, which are the whole message's
    exchange = gw.compress.randomk(density=0.3)
    with rejected(by=law_what_is_not_taken_is_put_back):
        for seed in range(10):
            case = Case(world=2, numel=64, seed=seed)
            law_what_is_not_taken_is_put_back(exchange, case, job_with(backup))


EVERY = {
    law
    for module in (
        bounded,
        collectives,
        compressors,
        decoupled_laws,
        densities,
        exchanges,
        growth,
        momentum_laws,
        planners,
        programs,
        roundings,
    )
    for name, law in vars(module).items()
    if name.startswith("law_")
}


@each("law", {*EVERY, *compressors.LAWS, *exchanges.LAWS}, ids=lambda f: f.__name__)
def test_every_law_says_what_holds_and_what_to_do(law: Callable[..., None]) -> None:
    verdict = Verdict(law, 1)
    assert verdict.sentence.endswith((".", ";"))
    assert verdict.remedy.endswith(".")
    assert "To do:" not in verdict.sentence + verdict.remedy
