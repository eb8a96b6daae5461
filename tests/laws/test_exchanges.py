"""Every exchange that ``pair`` makes, and every one of ``compress/``, keeps every law."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradwire.contract import Exchange

from .cases import name_of, own_exchanges, pairs, rotated
from .exchange_laws import LAWS

EXCHANGES: tuple[Exchange, ...] = (*pairs(), *own_exchanges())


@pytest.mark.parametrize("exchange", EXCHANGES, ids=name_of)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law(law: Callable[..., None], exchange: Exchange) -> None:
    for case in rotated(EXCHANGES.index(exchange) + LAWS.index(law)):
        law(exchange, case)
