"""Orders of messages, which choose ranks for work that not all ranks have to do."""

from collections import Counter
from collections.abc import Hashable, Iterable


def orders_of(exchanges: Iterable[Hashable]) -> list[int]:
    """The number of each message among its exchange's messages: see ``Member.order``.

    >>> orders_of(["dense", "onebit", "dense", "dense"])
    [0, 0, 1, 2]
    """
    before = Counter[Hashable]()
    orders = []
    for exchange in exchanges:
        orders.append(before[exchange])
        before[exchange] += 1
    return orders
