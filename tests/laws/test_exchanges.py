"""Every exchange that ``pair`` makes, and every one of ``compress/``, keeps every law."""

from __future__ import annotations

import pytest

from gradwire.collective.casync_ps import casync_ps
from gradwire.collective.casync_ring import casync_ring
from gradwire.contract import Exchange
from gradwire.exchange.error_feedback import feedback_refusal
from gradwire.exchange.pair import Pair
from gradwire_lab.laws import bounded, collectives, exchanges, growth, many_steps
from gradwire_lab.laws.cases import Case
from gradwire_lab.laws.subjects import Law
from tests.each import by_file
from tests.laws.cases import (
    kind_of,
    name_of,
    other_ways,
    own_exchanges,
    pairs,
    places_of_each_path,
    rotated,
)

USUAL = (*pairs(), *own_exchanges())
EXCHANGES: tuple[Exchange, ...] = (*USUAL, *other_ways())
FULL = places_of_each_path(USUAL)
"""Places of exchanges that take every path; the others differ in settings and combinations."""

LAWS = [
    law
    for law in (*exchanges.LAWS, *collectives.LAWS)
    if law not in (*many_steps.LAWS, collectives.law_never_deadlocks)
]
"""Laws of few steps. That no interleaving deadlocks shows where their results are compared."""


def laws_of(place: int, *, are_first: bool) -> list[Law]:
    """The first half of the laws of an exchange, or the second.

    An algorithm that is an exchange itself has all laws in the first, one of ``FULL`` two thirds.
    Of the others each half has a sixth of the laws, and the next pair of a collective has others.
    The first, whose codec loses nothing, is asked for the dense mean.
    """
    if not isinstance(EXCHANGES[place], Pair):
        return [law for law in LAWS if law in collectives.OF_ANY + exchanges.LAWS] * are_first
    if place in FULL:
        return [law for turn, law in enumerate(LAWS, place) if (turn % 3 > 0) is are_first]
    return LAWS[(turn_of(place) + (4 if are_first else 1)) % 6 :: 6]


def turn_of(place: int) -> int:
    """How many pairs of the same collective, with the same settings, come before this one."""
    way = getattr(EXCHANGES[place], "collective", None)
    return [getattr(made, "collective", None) for made in EXCHANGES[:place]].count(way)


def hold(place: int, laws: list[Law]) -> None:
    """Each law on another case, and the next exchange on others."""
    for law in laws:
        law(EXCHANGES[place], rotated(place + turn_of(place) + LAWS.index(law)))


@by_file(EXCHANGES)
def test_laws(subtests: pytest.Subtests, places: list[int]) -> None:
    for place in places:
        with subtests.test(name_of(EXCHANGES[place])):
            hold(place, laws_of(place, are_first=True))


@pytest.mark.slow
@by_file(EXCHANGES)
def test_more_laws(subtests: pytest.Subtests, places: list[int]) -> None:
    for place in places:
        with subtests.test(name_of(EXCHANGES[place])):
            hold(place, laws_of(place, are_first=False))


OF_A_KIND = [*{kind_of(exchange): exchange for exchange in (*other_ways(), *USUAL)}.values()]
ENCODED_AGAIN = [
    exchange
    for exchange in OF_A_KIND
    if not isinstance(exchange, Pair) or isinstance(exchange.collective, casync_ps | casync_ring)
]
"""One of each kind that encodes on the way.

What is encoded once, by its own rank, is lost alike among any number of ranks."""

ENCODING_SUMS = [
    exchange
    for exchange in ENCODED_AGAIN
    if isinstance(exchange, Pair) and exchange.collective.encodes_sums
]
"""One of each kind in which a sum is encoded again at every rank."""

MAY_KEEP = [exchange for exchange in OF_A_KIND if feedback_refusal(exchange) is None]
KEEPING = [*{kind_of(exchange)[0]: exchange for exchange in MAY_KEEP}.values()]
"""One for each algorithm, among the exchanges that may keep something."""


@pytest.mark.parametrize("exchange", ENCODING_SUMS, ids=name_of)
def test_means_do_not_grow_over_eight_ranks(exchange: Exchange) -> None:
    growth.law_means_do_not_grow_over_ranks_and_steps(exchange, growth.MANY_RANKS[0])


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ENCODED_AGAIN, ids=name_of)
def test_what_is_encoded_again_does_not_grow(exchange: Exchange) -> None:
    """Means with 16 and by turns with 8 ranks; what aggregators keep with 2, 3, 5 and 8."""
    turn = ENCODED_AGAIN.index(exchange)
    growth.law_means_do_not_grow_over_ranks_and_steps(exchange, growth.MANY_RANKS[turn % 2])
    world = (8, 2, 3, 5)[turn % 4]
    case = Case(world=world, numel=60, seed=world)
    many_steps.law_what_is_kept_does_not_grow_by_itself(exchange, case)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", OF_A_KIND, ids=name_of)
def test_laws_of_many_steps(exchange: Exchange) -> None:
    above = many_steps.law_what_is_kept_does_not_grow_by_itself
    for turn, law in enumerate(many_steps.LAWS, OF_A_KIND.index(exchange)):
        if law is not above or exchange not in ENCODED_AGAIN:
            law(exchange, rotated(turn))


@pytest.mark.slow
@pytest.mark.parametrize("exchange", KEEPING, ids=name_of)
def test_residuals_stay_bounded_over_400_steps(exchange: Exchange) -> None:
    case = Case(world=2, numel=60, seed=KEEPING.index(exchange))
    bounded.law_residuals_stay_bounded(exchange, case)
