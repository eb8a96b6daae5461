"""Helpers that quantisers share: inverses of scales, and refusals of settings."""

from __future__ import annotations

import torch

from ..contract.bounds import check_number
from ..dsl.language import Scalar, finite, where
from ..errors import invalid

_FLOAT32 = torch.finfo(torch.float32)


def inverse(scale: Scalar, over: float = 1.0) -> Scalar:
    """``over / scale``; 0 where that is not finite, so that zeros stay zeros."""
    quotient = over / scale
    return where(finite(quotient), quotient, 0.0)


def check_positive(what: str, given: object, remedy: str) -> None:
    """Refuses all but numbers above 0 in float32: others would be 0 or infinite."""
    accepted = (
        f"a finite number above 0, in float32 {_FLOAT32.tiny:.3g} to {_FLOAT32.max:.3g}"
    )
    check_number(what, given, accepted, remedy, _FLOAT32.tiny, _FLOAT32.max)


def check_choice(what: str, given: object, accepted: tuple[object, ...]) -> None:
    """Refuses all but the values in ``accepted``."""
    if given not in accepted:
        choices = f"{', '.join(map(repr, accepted[:-1]))} or {accepted[-1]!r}"
        raise invalid(what, given, choices, "choose one of them")
