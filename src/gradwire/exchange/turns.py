"""Turns: what not all ranks have to do for a message they do one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable


def turns_of(exchanges: Iterable[Hashable]) -> list[int]:
    """The turn of each message, by all exchanges in issue order: see ``Member.turn``.

    >>> turns_of(["dense", "onebit", "dense", "dense"])
    [0, 0, 1, 2]
    """
    before = Counter[Hashable]()
    turns = []
    for exchange in exchanges:
        turns.append(before[exchange])
        before[exchange] += 1
    return turns
