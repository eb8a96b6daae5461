"""Every compressor, with every example of its settings, keeps every law."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from gradwire.contract import Compressor
from gradwire_lab.laws.compressors import LAWS, law_unbiased
from gradwire_lab.laws.inputs import make_gradient
from tests.each import by_file, each
from tests.laws.cases import SHARES, Share, compressors, draw_of, share_of
from tests.strategies import panel

BRIEF = [law for law in LAWS if law is not law_unbiased]
"""The other takes hundreds of steps."""
FIRST = {type(codec): codec for codec in reversed(compressors())}.values()
UNBIASED = [codec for codec in FIRST if codec.traits.unbiased]


@SHARES
@by_file(compressors())
def test_every_compressor_keeps_every_law(
    subtests: pytest.Subtests, places: list[int], share: Share
) -> None:
    """The sample has each algorithm's first example; others are its other settings."""
    for codec in (compressors()[place] for place in places):
        with subtests.test(repr(codec)):
            if share_of(hold_all, codec, codec in FIRST) is share:
                hold_all(codec)


def hold_all(codec: Compressor) -> None:
    """With an algorithm's first example each law meets every third gradient, as names
    draw it.

    With other settings each law meets every ninth gradient.
    """
    share = 3 if codec in FIRST else 9
    for (number, grad_N), law in product(enumerate(panel()), BRIEF):
        if draw_of(law.__name__, repr(codec), number) % share == 0:
            law(codec, grad_N)
    kinds = ("normal", "ties", "wide", "equal")
    turn = draw_of(repr(codec)) % len(kinds)
    for kind in kinds if codec in FIRST else kinds[turn : turn + 1]:
        law_unbiased(codec, make_gradient(kind, 65, torch.float32, seed=1))


def test_each_law_meets_each_algorithm_and_each_gradient() -> None:
    """In the sample, whatever the draw."""
    every = range(len(panel()))
    for law in BRIEF:
        met = {
            codec: {n for n in every if draw_of(law.__name__, repr(codec), n) % 3 == 0}
            for codec in FIRST
        }
        assert all(met.values())
        assert {number for found in met.values() for number in found} == {*every}


@pytest.mark.slow
@each("place", range(len(UNBIASED)), ids=lambda at: repr(UNBIASED[at]))
def test_unbiased_compressors_are_so_on_every_gradient_of_the_panel(place: int) -> None:
    """Every third gradient, the next compressor others."""
    for grad_N in panel()[place % 3 :: 3]:
        law_unbiased(UNBIASED[place], grad_N)
