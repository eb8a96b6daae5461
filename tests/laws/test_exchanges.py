"""Every exchange that ``pair`` makes, and every one of ``compress/``, keeps every
law.
"""

from __future__ import annotations

import pytest

from gradwire.collective.casync_ps import casync_ps
from gradwire.compress.onebit import onebit
from gradwire.contract import Exchange
from gradwire.exchange.error_feedback import feedback_refusal
from gradwire.exchange.pair import Pair, pair
from gradwire_lab.collective.casync_ring import casync_ring
from gradwire_lab.laws import bounded, collectives, exchanges, growth, many_steps
from gradwire_lab.laws.subjects import Law
from tests.each import by_file, each
from tests.laws.cases import (
    ALWAYS,
    MARKS,
    NIGHTLY,
    SHARES,
    Share,
    drawn_case,
    full_name_of,
    kind_of,
    name_of,
    of_library,
    of_one,
    other_ways,
    own_exchanges,
    pairs,
    part_of,
    places_of_each_path,
    sample_of,
    share_of,
)

USUAL = (*pairs(), *own_exchanges())
EXCHANGES: tuple[Exchange, ...] = (*USUAL, *other_ways())

LAWS = [
    law
    for law in (*exchanges.LAWS, *collectives.LAWS)
    if law not in (*many_steps.LAWS, collectives.law_never_deadlocks)
]
"""Laws of few steps. That no interleaving deadlocks shows where their results are
compared.
"""


def asked_of(law: Law) -> list[Exchange]:
    """The exchanges that a law is about; some laws are not about algorithms that are
    exchanges themselves.
    """
    if law in collectives.OF_ANY + exchanges.LAWS:
        return [*EXCHANGES]
    return [made for made in EXCHANGES if isinstance(made, Pair)]


SAMPLES = {law: sample_of(law, asked_of(law)) for law in LAWS}
"""The exchanges that `make test` asks each law of."""


@SHARES
@by_file(EXCHANGES)
def test_every_exchange_keeps_every_law(
    subtests: pytest.Subtests, places: list[int], share: Share
) -> None:
    """Each law in a case that is drawn."""
    for exchange in (EXCHANGES[place] for place in places):
        with subtests.test(full_name_of(exchange)):
            for law in LAWS:
                is_asked = exchange in asked_of(law)
                is_sample = exchange in SAMPLES[law]
                if is_asked and share_of(law, exchange, is_sample) is share:
                    law(exchange, drawn_case(law, exchange))


@each("law", LAWS, ids=lambda law: law.__name__)
def test_the_sample_asks_a_law_of_every_algorithm(law: Law) -> None:
    """Whatever the order of the registries, and by few exchanges.

    `make test` asks it of each of the library's, by exchanges of these alone.
    """
    files = {file for made in asked_of(law) for file in kind_of(made)}
    assert {file for made in SAMPLES[law] for file in kind_of(made)} == files
    fast = [made for made in SAMPLES[law] if of_library(made)]
    own = {file for file in files if of_library(file)}
    assert {file for made in fast for file in kind_of(made)} == own
    assert sample_of(law, asked_of(law)[::-1]) == SAMPLES[law]
    assert len(SAMPLES[law]) < len(EXCHANGES) / 3


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


SUMS_ENCODED = [made for made in ENCODED_AGAIN if made.collective.encodes_sums]
GROWING = part_of(growth.law_means_do_not_grow_over_ranks_and_steps, SUMS_ENCODED, 3)


@pytest.mark.parametrize(
    "exchange",
    [
        STRETCHED,
        *GROWING,
        *(
            pytest.param(made, marks=pytest.mark.slow)
            for made in SUMS_ENCODED
            if made not in GROWING
        ),
    ],
    ids=name_of,
)
def test_means_do_not_grow_over_eight_ranks(exchange: Exchange) -> None:
    """Of each kind in which a sum is encoded again at every rank."""
    growth.law_means_do_not_grow_over_ranks_and_steps(
        exchange, of_one(exchange, 8, 60, seed=8)
    )


BY_DAY = sample_of(many_steps.law_what_is_kept_does_not_grow_by_itself, KEEPING)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=pytest.mark.slow if made in BY_DAY else NIGHTLY)
        for place, made in enumerate(KEEPING)
    ],
    ids=lambda at: name_of(KEEPING[at]),
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


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(
            place,
            marks=MARKS[share_of(bounded.law_residuals_stay_bounded, made, False)],
        )
        for place, made in enumerate(ALGORITHMS)
    ],
    ids=lambda at: name_of(ALGORITHMS[at]),
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
