"""Every exchange that ``pair`` makes, and every one of ``compress/``, keeps every law."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradwire.contract import Exchange
from gradwire.laws import collectives
from gradwire.laws.exchanges import LAWS

from .cases import name_of, own_exchanges, pairs, rotated

EXCHANGES: tuple[Exchange, ...] = (*pairs(), *own_exchanges())


@pytest.mark.parametrize("exchange", EXCHANGES, ids=name_of)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law(law: Callable[..., None], exchange: Exchange) -> None:
    for case in rotated(EXCHANGES.index(exchange) + LAWS.index(law)):
        law(exchange, case)


@pytest.mark.parametrize("exchange", own_exchanges(), ids=name_of)
@pytest.mark.parametrize("law", collectives.OF_ANY, ids=lambda law: law.__name__)
def test_law_of_collectives(law: Callable[..., None], exchange: Exchange) -> None:
    """An exchange of its own is its own collective."""
    for case in rotated(own_exchanges().index(exchange) + collectives.OF_ANY.index(law)):
        law(exchange, case)
