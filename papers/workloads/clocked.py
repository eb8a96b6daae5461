"""clocked: how long an exchange's own work takes, whoever drives it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from gradwire.contract.verbs import Compute, Steps, Verb

T = TypeVar("T")
Spent = dict[tuple[str, int], list[float]]
"""Seconds of Computes by their name and number of elements, in the order in which they
ran.
"""


def clocked(
    steps: Steps[T], spent: Spent, clock: Callable[[], float] = time.perf_counter
) -> Steps[T]:
    """The steps, with the seconds of each of their Computes kept in ``spent``.

    ``clock`` may be ``time.thread_time``, which stands still while others have the
    core.

    >>> from gradwire.exchange.local import drive
    >>> def steps():
    ...     return (yield Compute("encode", lambda: 7, 100))
    >>> spent = {}
    >>> drive([clocked(steps(), spent)]).results, list(spent)
    ([7], [('encode', 100)])
    """
    return watched(steps, lambda verb: _clocked(verb, spent, clock))


def watched(steps: Steps[T], see: Callable[[Verb], Verb]) -> Steps[T]:
    """The steps, whose verbs all pass through ``see``: what it returns is carried
    out.
    """
    value: Any = None
    while True:
        try:
            asked = steps.send(value)
        except StopIteration as stop:
            result: T = stop.value
            return result
        value = yield tuple(map(see, asked)) if isinstance(asked, tuple) else see(asked)


def _clocked(verb: Verb, spent: Spent, clock: Callable[[], float]) -> Verb:
    if not isinstance(verb, Compute):
        return verb
    fn = verb.fn
    key = (verb.name, verb.numel)

    def timed() -> Any:
        start_s = clock()
        value = fn()
        spent.setdefault(key, []).append(clock() - start_s)
        return value

    return replace(verb, fn=timed)
