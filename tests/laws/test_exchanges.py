"""Every exchange that ``pair`` makes, and every one of ``compress/``, keeps every
law.
"""

from __future__ import annotations

import pytest

from gradwire.collective.casync_ps import casync_ps
from gradwire.collective.casync_ring import casync_ring
from gradwire.compress.onebit import onebit
from gradwire.contract import Exchange
from gradwire.exchange.error_feedback import feedback_refusal
from gradwire.exchange.pair import Pair, pair
from gradwire_lab.laws import bounded, collectives, exchanges, growth, many_steps
from gradwire_lab.laws.subjects import Law
from tests.each import by_file, each
from tests.laws.cases import (
    ALWAYS,
    kind_of,
    name_of,
    of_one,
    other_ways,
    own_exchanges,
    pairs,
    places_of_each_path,
    rotated,
)

USUAL = (*pairs(), *own_exchanges())
EXCHANGES: tuple[Exchange, ...] = (*USUAL, *other_ways())
FULL = places_of_each_path(USUAL)
"""Places of exchanges that take every path; the others differ in settings and
combinations.
"""

LAWS = [
    law
    for law in (*exchanges.LAWS, *collectives.LAWS)
    if law not in (*many_steps.LAWS, collectives.law_never_deadlocks)
]
"""Laws of few steps. That no interleaving deadlocks shows where their results are
compared.
"""


def laws_of(place: int, part: int) -> list[Law]:
    """The first part of the laws of an exchange, or the second.

    An algorithm that is an exchange itself has all laws in the first, one of ``FULL``
    two thirds. Each of the others has an eighth of the laws, and the next pair of a
    collective has others. The first, whose codec loses nothing, is asked for the dense
    mean.
    """
    if not isinstance(EXCHANGES[place], Pair):
        return (
            []
            if part
            else [law for law in LAWS if law in collectives.OF_ANY + exchanges.LAWS]
        )
    if place in FULL:
        return [law for turn, law in enumerate(LAWS, place) if (turn % 3 == 0) == part]
    return [] if part else LAWS[(turn_of(place) + 4) % 8 :: 8]


def turn_of(place: int) -> int:
    """How many pairs of the same collective, with the same settings, come before this
    one.
    """
    way = getattr(EXCHANGES[place], "collective", None)
    return [getattr(made, "collective", None) for made in EXCHANGES[:place]].count(way)


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
@by_file(EXCHANGES)
def test_every_exchange_keeps_every_law(
    subtests: pytest.Subtests, places: list[int], part: int
) -> None:
    """Each law on another case, and the next exchange on others."""
    for place in places:
        with subtests.test(name_of(EXCHANGES[place])):
            for law in laws_of(place, part):
                law(EXCHANGES[place], rotated(place + turn_of(place) + LAWS.index(law)))


OF_A_KIND = [
    *{kind_of(exchange): exchange for exchange in (*other_ways(), *USUAL)}.values()
]
ENCODED_AGAIN = [
    exchange
    for exchange in OF_A_KIND
    if isinstance(exchange, Pair)
    and isinstance(exchange.collective, casync_ps | casync_ring)
]
"""One of each kind that encodes on the way.

What is encoded once, by its own rank, is lost alike among any number of ranks, and is
tried with one exchange of each path.
"""

TRIED = [
    *ENCODED_AGAIN,
    *(OF_A_KIND[place] for place in places_of_each_path(OF_A_KIND)),
]
KEEPING = [*dict.fromkeys(made for made in TRIED if feedback_refusal(made) is None)]
"""Exchanges that may keep something."""
ALGORITHMS = [*{kind_of(exchange)[0]: exchange for exchange in KEEPING}.values()]


STRETCHED = pair(onebit(block=64), casync_ring())
"""A compressor that makes vectors larger, but for sums; its last example does not."""


@pytest.mark.parametrize(
    "exchange",
    [STRETCHED, *(made for made in ENCODED_AGAIN if made.collective.encodes_sums)],
    ids=name_of,
)
def test_means_do_not_grow_over_eight_ranks(exchange: Exchange) -> None:
    """Of each kind in which a sum is encoded again at every rank."""
    growth.law_means_do_not_grow_over_ranks_and_steps(
        exchange, of_one(exchange, 8, 60, seed=8)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", range(len(KEEPING)), ids=lambda at: name_of(KEEPING[at])
)
def test_what_is_kept_does_not_grow(place: int) -> None:
    exchange, world = KEEPING[place], (3, 2, 5)[place % 3]
    case = of_one(exchange, world, 6, seed=world)
    many_steps.law_what_is_kept_does_not_grow_by_itself(exchange, case)


@pytest.mark.slow
@each("exchange", ENCODED_AGAIN, ids=name_of)
def test_means_of_what_is_drawn_are_unbiased(exchange: Exchange) -> None:
    many_steps.law_ranks_draw_apart(exchange, ALWAYS)
    many_steps.law_unbiased_codecs_make_unbiased_means(exchange, ALWAYS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", range(len(ALGORITHMS)), ids=lambda at: name_of(ALGORITHMS[at])
)
def test_residuals_stay_bounded_over_400_steps(place: int) -> None:
    case = of_one(ALGORITHMS[place], 2, 6, seed=place)
    bounded.law_residuals_stay_bounded(ALGORITHMS[place], case)


@by_file(EXCHANGES)
def test_ranks_decide_by_the_same_numbers(
    subtests: pytest.Subtests, places: list[int]
) -> None:
    """Of every exchange: checkpoints whose whole numbers differ among ranks are
    refused.
    """
    for place in places:
        with subtests.test(name_of(EXCHANGES[place])):
            exchanges.law_whole_numbers_of_the_state_are_shared(
                EXCHANGES[place], ALWAYS
            )
