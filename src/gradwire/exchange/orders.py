"""Orders of messages, which choose the ranks that do what not all have to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable


def orders_of(exchanges: Iterable[Hashable]) -> list[int]:
    """The order of each message among those of its exchange: see ``Member.order``.

    >>> orders_of(["dense", "onebit", "dense", "dense"])
    [0, 0, 1, 2]
    """
    before = Counter[Hashable]()
    orders = []
    for exchange in exchanges:
        orders.append(before[exchange])
        before[exchange] += 1
    return orders
