"""Every exchange that ``pair`` makes, and every one of ``compress/``, keeps every law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gradwire.collective.casync_ps import casync_ps
from gradwire.collective.casync_ring import casync_ring
from gradwire.contract import Exchange
from gradwire.exchange.error_feedback import feedback_refusal
from gradwire.exchange.pair import Pair
from gradwire_lab.laws import bounded, collectives, growth, many_steps
from gradwire_lab.laws.cases import Case
from gradwire_lab.laws.exchanges import LAWS
from tests.each import by_file
from tests.laws.cases import ALWAYS, kind_of, name_of, other_ways, own_exchanges, pairs, rotated

EXCHANGES: tuple[Exchange, ...] = (*other_ways(), *pairs(), *own_exchanges())


def hold(laws: Sequence[Callable[..., Any]], exchange: Exchange, place: int) -> None:
    """Each law on another case, so that all cases occur; a law that breaks says its name."""
    for number, law in enumerate(laws):
        law(exchange, rotated(place + number))


ENCODED_AGAIN = [
    place
    for place, exchange in enumerate(EXCHANGES)
    if not isinstance(exchange, Pair) or isinstance(exchange.collective, casync_ps | casync_ring)
]
"""Places of exchanges that encode on the way. What is encoded once, by its own rank, is lost alike
among any number of ranks."""

FIRST = {
    (*kind_of(exchange), getattr(exchange, "collective", None)): place
    for place, exchange in reversed([*enumerate(EXCHANGES)])
    if place in ENCODED_AGAIN
}.values()
"""Places of the first of each kind among these."""

ENCODING_SUMS = {
    kind_of(made): place
    for place in ENCODED_AGAIN
    if isinstance(made := EXCHANGES[place], Pair) and made.collective.encodes_sums
}.values()
"""Places of one of each kind in which a sum is encoded again at every rank."""


BRIEF = [law for law in LAWS if law not in many_steps.LAWS]
OF_A_KIND = {kind_of(exchange): place for place, exchange in enumerate(EXCHANGES)}.values()
"""Places of one of each kind; the others differ from these in settings."""

KEEPING = {
    kind_of(EXCHANGES[place])[-1 if at else 0]: place
    for at in (True, False)
    for place in OF_A_KIND
    if feedback_refusal(EXCHANGES[place]) is None
}.values()
"""Places of one for each collective and each algorithm, among those that may keep something."""


@by_file(EXCHANGES)
def test_laws(subtests: pytest.Subtests, places: list[int]) -> None:
    """All laws for one of each kind; with other settings half of them, and half in a slow test."""
    for place in places:
        of_pairs = isinstance(EXCHANGES[place], Pair)
        with subtests.test(name_of(EXCHANGES[place])):
            for number, law in enumerate(
                (*BRIEF, *(collectives.LAWS if of_pairs else collectives.OF_ANY))
            ):
                if place in OF_A_KIND or (place + number) % 2:
                    law(EXCHANGES[place], rotated(place + number))


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(EXCHANGES)), ids=lambda at: name_of(EXCHANGES[at]))
def test_laws_with_one_case(place: int) -> None:
    """Half of the laws for one exchange, half for the next; above all are held on other cases."""
    exchange = EXCHANGES[place]
    of_pairs = isinstance(exchange, Pair)
    laws = (*BRIEF, *(collectives.LAWS if of_pairs else collectives.OF_ANY))
    for law in laws[place % 2 :: 2]:
        law(exchange, ALWAYS)


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(EXCHANGES)), ids=lambda at: name_of(EXCHANGES[at]))
def test_laws_of_many_steps(place: int) -> None:
    longest = many_steps.law_what_is_kept_does_not_grow_by_itself
    laws = [law for law in many_steps.LAWS if law is not longest or place not in ENCODED_AGAIN]
    hold(laws, EXCHANGES[place], place)  # the others are held to the longest below


@pytest.mark.slow
@pytest.mark.parametrize("place", ENCODED_AGAIN, ids=lambda at: name_of(EXCHANGES[at]))
def test_nothing_kept_grows_with_two_to_eight_ranks(place: int) -> None:
    """What an aggregator loses may grow with its ranks: tried with 8, and by turns 2, 3 or 5.

    With other settings an algorithm is tried with few ranks.
    """
    world = (8, 2, 8, 3, 8, 5)[place % 6] if place in FIRST else (2, 3)[place % 2]
    case = Case(world=world, numel=60, seed=world)
    many_steps.law_what_is_kept_does_not_grow_by_itself(EXCHANGES[place], case)


@pytest.mark.slow
@pytest.mark.parametrize("place", sorted({*KEEPING}), ids=lambda at: name_of(EXCHANGES[at]))
def test_residuals_stay_bounded_over_400_steps(place: int) -> None:
    bounded.law_residuals_stay_bounded(EXCHANGES[place], Case(world=2, numel=60, seed=place))


@pytest.mark.parametrize("place", ENCODING_SUMS, ids=lambda at: name_of(EXCHANGES[at]))
def test_means_do_not_grow_over_eight_ranks(place: int) -> None:
    (case,) = (case for case in growth.MANY_RANKS if case.world == 8)
    growth.law_means_do_not_grow_over_ranks_and_steps(EXCHANGES[place], case)


@pytest.mark.slow
@pytest.mark.parametrize("place", ENCODED_AGAIN, ids=lambda at: name_of(EXCHANGES[at]))
def test_means_do_not_grow_over_ranks_and_steps(place: int) -> None:
    for case in growth.MANY_RANKS:
        growth.law_means_do_not_grow_over_ranks_and_steps(EXCHANGES[place], case)
