"""Fractions: how a measurement tells a bar of progress how far it is."""

from collections.abc import Callable


class Fractions:
    """Turns reports of progress, (fraction, what), into a `progress` bar's advances."""

    def __init__(self, advance: Callable[..., None]) -> None:
        self._advance = advance
        self._done = 0.0

    def __call__(self, fraction: float, what: str) -> None:
        self._advance(fraction - self._done, what)
        self._done = fraction
