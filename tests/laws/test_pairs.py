"""Every compressor by every collective that takes it, where code takes another way.

The law of 12 steps is asked at the sizes and numbers of ranks of ``LARGE``, by turns:
of exchanges that take each path in each run, of one of each kind in a slow test. A
scheme that sees entries alone is tried with compressors that lose nothing or take
equally many entries each time.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from gradwire.collective.casync_ps import casync_ps
from gradwire.collective.steps.chunks import Chunks
from gradwire.compress.onebit import onebit
from gradwire.compress.topk import topk
from gradwire.contract import Exchange
from gradwire.contract.registry import examples
from gradwire.errors import IncompatiblePair
from gradwire.exchange.pair import Pair, pair
from gradwire_lab.collective.casync_ring import casync_ring
from gradwire_lab.compress.dgc import dgc
from gradwire_lab.compress.qsgd import qsgd
from gradwire_lab.laws.bounded import law_means_follow_the_dense_mean
from gradwire_lab.laws.cases import Case
from tests.each import each
from tests.laws import broken_collectives, broken_compressors
from tests.laws.broken import _with
from tests.laws.cases import (
    NIGHTLY,
    Share,
    compressors,
    full_name_of,
    kind_of,
    of_library,
    own_exchanges,
    places_of_each_path,
    share_of,
)
from tests.laws.test_laws_bite import rejected

LARGE = tuple(
    Case(world=world, numel=numel, seed=world)
    for world, numel in (
        (3, 65_537),
        (7, 16_385),
        (5, 16_384),
        (6, 16_385),
        (4, 65_537),
    )
)
"""Sizes at which code takes another way: 64 KiB of float32 and one element more, and a
block of 65,536 elements and one; numbers of ranks that are a power of two and not.
"""

COLLECTIVES = (
    *examples("collective"),
    casync_ps(room_bytes=1024, partitions=2),
    casync_ring(half_bytes=1024, partitions=2),
)
"""With settings under which messages as short as these go in rounds and in halves, and
the first rank serves the last part.
"""


def _all() -> list[Exchange]:
    made: list[Exchange] = []
    for codec in compressors():
        for collective in COLLECTIVES:
            try:
                made.append(pair(codec, collective))
            except IncompatiblePair:
                continue
    return [*made, *own_exchanges()]


EVERY = _all()
SOME = places_of_each_path(EVERY)
OTHERS = {
    kind_of(made): place
    for place, made in enumerate(EVERY)
    if place not in SOME and isinstance(made, Pair)
    if made.collective.exact_size
    or made.codec.traits.lossless
    or made.codec.traits.exact_size
}
"""Of each kind one, with the last example's settings."""


def _share(place: int) -> Share:
    return share_of(law_means_follow_the_dense_mean, EVERY[place], is_sample=False)


SLOW = [
    pytest.param(
        place, marks=pytest.mark.slow if _share(place) is Share.DAY else NIGHTLY
    )
    for place in OTHERS.values()
]


PATHS = [
    place if of_library(EVERY[place]) else pytest.param(place, marks=pytest.mark.slow)
    for place in sorted(SOME)
]


@pytest.mark.parametrize(
    "place", [*PATHS, *SLOW], ids=lambda at: full_name_of(EVERY[at])
)
def test_means_of_twelve_steps_follow_the_dense_mean(place: int) -> None:
    law_means_follow_the_dense_mean(EVERY[place], LARGE[place % len(LARGE)])


@pytest.mark.slow
@each("world", [2, 3, 5, 6])
def test_a_ring_selects_again_in_any_number_of_partitions(world: int) -> None:
    """DGC, whose number of elements varies, and top-k; the lengths by turns."""
    for turn, partitions in enumerate(dict.fromkeys((None, 1, world - 1)), world):
        numel = (16_384, 16_385, 65_537)[turn % 3]
        codec = (dgc(density=0.05), topk(density=0.05))[turn % 2]
        around = pair(
            codec, casync_ring(partitions=partitions, half_bytes=turn % 2 * 4096)
        )
        law_means_follow_the_dense_mean(
            around, Case(world=world, numel=numel, seed=turn)
        )


@each(
    "wrong",
    [
        _with(broken_collectives.asks_for_its_payload_again()),
        _with(broken_collectives.starts_with_itself()),
        _with(broken_collectives.forgets_a_rank()),
        _with(broken_collectives.hides_aggregator_loss(), onebit()),
        _with(broken_collectives.forgets_what_hops_drop(), dgc(density=0.05)),
        _with(broken_collectives.trusts_old_buffers()),
        _with(
            casync_ps(), broken_compressors.claims_nonexpansive(bitwidth=2, norm="l2")
        ),
        _with(broken_collectives.gathers(), broken_compressors.rounds_down()),
    ],
    ids=full_name_of,
)
def test_the_law_bites(wrong: Any) -> None:
    with rejected(by=law_means_follow_the_dense_mean):
        law_means_follow_the_dense_mean(wrong, LARGE[0])


def test_the_law_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that are cut in the order of ranks are wrong where the first rank has the
    last one.
    """

    def in_order_of_ranks(self: Chunks, flat_N: Tensor) -> list[Tensor]:
        return list(flat_N.split([stop - start for start, stop in self.bounds]))

    monkeypatch.setattr(Chunks, "of", in_order_of_ranks)
    with rejected(by=law_means_follow_the_dense_mean):
        law_means_follow_the_dense_mean(_with(casync_ps(partitions=2)), LARGE[0])


def test_the_law_accepts_what_these_are_made_of() -> None:
    for made in (_with(broken_collectives.gathers()), _with(casync_ps(), qsgd())):
        law_means_follow_the_dense_mean(made, LARGE[0])
