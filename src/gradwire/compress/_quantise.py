"""Helpers that quantisers share: inverses of scales."""

import torch

from ..dsl.language import Scalar, finite, where

_FLOAT32 = torch.finfo(torch.float32)
_LEAST = _FLOAT32.tiny * _FLOAT32.eps
"""The least float32 above 0, and the distance between all numbers below ``tiny``."""


def inverse(scale: Scalar, over: float = 1.0) -> Scalar:
    """``over / scale``; 0 where that is not finite, so that zeros stay zeros."""
    quotient = over / scale
    return where(finite(quotient), quotient, 0.0)


def lift(scale: Scalar) -> Scalar:
    """2**64 where the inverse of ``scale`` may be infinite, else 1.

    Elements times this number and the scale times this number have the same quotient.
    """
    return where(scale < 2.0**-100, 2.0**64, 1.0)


def divisible(whole: Scalar, steps: int) -> Scalar:
    """``whole``, or the next number above it whose ``steps``-th is a float32.

    A step below the least normal number is rounded up. If it were rounded down, as many
    steps would not reach from end to end.
    """
    step = whole / steps
    step = where(step * steps < whole, step + _LEAST, step)
    return where(whole < steps * _FLOAT32.tiny, step * steps, whole)
