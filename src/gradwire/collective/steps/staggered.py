"""Texts side by side: while one waits for the network, another computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ...contract.verbs import Steps, Verb

T = TypeVar("T")


def staggered(texts: Sequence[Steps[T]]) -> Steps[list[T]]:
    """Runs texts of tuples side by side, each a tuple behind the one before it.

    Returns all results. Every text yields as many tuples on every rank, of which some may be
    empty. So what one rank sends another comes in the order in which it is taken there. An empty
    tuple of all is no step.
    """
    results: list[Any] = [None] * len(texts)
    values: list[Any] = [None] * len(texts)
    open_texts, begun = set(range(len(texts))), 0
    while open_texts:
        begun += 1
        rows: dict[int, tuple[Verb, ...]] = {}
        for number in sorted(open_texts):
            if number < begun:
                try:
                    asked = texts[number].send(values[number])
                except StopIteration as stop:
                    results[number] = stop.value
                    open_texts.remove(number)
                else:
                    assert isinstance(asked, tuple), "a text of tuples"
                    rows[number] = asked
        verbs = [verb for row in rows.values() for verb in row]
        done = iter((yield tuple(verbs)) if verbs else ())
        for number, row in rows.items():
            values[number] = tuple(next(done) for _ in row)
    return results
