"""A threshold estimated from a sample, as DGC and gradient dropping select by."""

import math

from gradwire.dsl.language import (
    Scalar,
    Vector,
    filter,
    greater,
    map,
    pick,
    sample,
    sort,
)

LEAST_ABOVE = 64
"""The number of a sample above its threshold, which spreads by an eighth."""


def reaching(gradient: Vector, density: float, share: float) -> Vector:
    """About ``density`` of the gradient, by the magnitude this share of a sample has.

    The sample is ``share`` of the gradient, and never fewer than
    ``LEAST_ABOVE / density`` draws, unless these are more than there are elements: then
    it is the gradient. Zeros are never among what is kept; what is not finite always
    is; with density 1 all else is.
    """
    drawn = sample(
        map(gradient, abs), share, least=math.ceil(min(LEAST_ABOVE / density, 2**31))
    )
    threshold = pick(sort(drawn, greater), density)
    if density == 1:
        threshold = threshold * 0.0  # the least of a sample is not the least of all

    def reaches(x: Scalar) -> Scalar:
        return ~(abs(x) < threshold) & (x != 0)

    return filter(gradient, reaches)
