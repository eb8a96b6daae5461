"""The compressor that examples/ shows keeps every law that gradwire's own keep."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from torch import Tensor

from examples.own_compressor import ternary
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.pair import Pair
from gradwire_lab.laws import collectives, exchanges
from gradwire_lab.laws.cases import FEW
from gradwire_lab.laws.compressors import LAWS
from tests.strategies import bounded, gradients, panel


def test_laws() -> None:
    @bounded(15)
    @given(grad_N=gradients())
    def hold(grad_N: Tensor) -> None:
        for law in LAWS:
            law(ternary(), grad_N)

    for grad_N, law in product(panel(), LAWS):
        law(ternary(), grad_N)
    hold()


@pytest.mark.slow
@pytest.mark.parametrize("law", [*collectives.LAWS, *exchanges.LAWS], ids=lambda law: law.__name__)
def test_law_of_its_exchange(law: Callable[..., None]) -> None:
    pair = exchange_for(ternary()).inner
    assert isinstance(pair, Pair)
    for case in FEW:
        law(pair, case)
