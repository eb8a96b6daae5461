"""Every compressor, with every example of its settings, keeps every law."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from gradwire.contract import Compressor
from gradwire_lab.laws.compressors import LAWS, law_unbiased
from gradwire_lab.laws.inputs import make_gradient
from tests.each import by_file, each
from tests.laws.cases import compressors
from tests.strategies import panel

BRIEF = [law for law in LAWS if law is not law_unbiased]
"""The other takes hundreds of steps."""
FIRST = {type(codec): codec for codec in reversed(compressors())}.values()
UNBIASED = [codec for codec in FIRST if codec.traits.unbiased]


@by_file(compressors())
def test_every_compressor_keeps_every_law(
    subtests: pytest.Subtests, places: list[int]
) -> None:
    for codec in (compressors()[place] for place in places):
        with subtests.test(repr(codec)):
            hold_all(codec)


def hold_all(codec: Compressor) -> None:
    """With an algorithm's first example each law meets every third gradient, the next
    others.

    With other settings each law meets every ninth gradient.
    """
    for (i, grad_N), (j, law) in product(enumerate(panel()), enumerate(BRIEF)):
        if (i + j) % (3 if codec in FIRST else 9) == 0:
            law(codec, grad_N)
    kinds = ("normal", "ties", "wide", "equal")
    turn = compressors().index(codec) % len(kinds)
    for kind in kinds if codec in FIRST else kinds[turn : turn + 1]:
        law_unbiased(codec, make_gradient(kind, 65, torch.float32, seed=1))


@pytest.mark.slow
@each("place", range(len(UNBIASED)), ids=lambda at: repr(UNBIASED[at]))
def test_unbiased_compressors_are_so_on_every_gradient_of_the_panel(place: int) -> None:
    """Every third gradient, the next compressor others."""
    for grad_N in panel()[place % 3 :: 3]:
        law_unbiased(UNBIASED[place], grad_N)
