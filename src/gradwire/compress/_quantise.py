"""What quantisers share: the inverse of a scale, and the refusal of settings."""

from __future__ import annotations

import math

from ..dsl.language import Scalar, finite, where
from ..errors import invalid


def inverse(scale: Scalar, over: float = 1.0) -> Scalar:
    """``over / scale``; 0 where that is not finite, so that zeros stay zeros."""
    quotient = over / scale
    return where(finite(quotient), quotient, 0.0)


def check_positive(what: str, given: object, remedy: str) -> None:
    """Refuses all but finite numbers above 0; NaN is not above 0."""
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if not number or not 0 < given < math.inf:  # type: ignore[operator]  # checked just before
        raise invalid(what, given, "a finite number above 0", remedy)


def check_choice(what: str, given: object, accepted: tuple[object, ...]) -> None:
    """Refuses all but the values in ``accepted``."""
    if given not in accepted:
        choices = f"{', '.join(map(repr, accepted[:-1]))} or {accepted[-1]!r}"
        raise invalid(what, given, choices, "choose one of them")
