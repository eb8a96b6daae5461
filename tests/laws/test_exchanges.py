"""Every exchange that ``pair`` makes keeps every law."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradwire.exchange import Pair

from .cases import name_of, pairs, rotated
from .exchange_laws import LAWS


@pytest.mark.parametrize("exchange", pairs(), ids=name_of)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law(law: Callable[..., None], exchange: Pair) -> None:
    for case in rotated(pairs().index(exchange) + LAWS.index(law)):
        law(exchange, case)
