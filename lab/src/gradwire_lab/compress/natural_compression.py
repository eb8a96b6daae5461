"""natural_compression: each element becomes a power of two next to it, at random.

Source: Horvath, Ho, Horvath, Sahu, Canini, Richtarik, arXiv 1905.10988 (Natural
    Compression for Distributed Deep Learning): sign and exponent are sent. The nearer
    power is the likelier one, so that the mean is the element; the variance is at most
    an eighth of the square.
Differences: what is below 2**-126 is sent as 0, so it is not unbiased there. Rounding
    it up at times would not be nonexpansive. From 2**127 on elements are rounded down,
    as the next power is infinity. Infinity and NaN are sent as infinity.
Wire: signs_N in 1 bit, exponents_N uint8 (n + 127 for 2**n; 0 for 0) -> ceil(N / 8) + N
bytes.
State: (stream, step) of the random numbers. Contributed: the decoded gradient.
"""

from gradwire.dsl.language import (
    Compressed,
    Scalar,
    Vector,
    concat,
    extract,
    map,
    random,
    smaller,
    uint1,
    uint8,
    where,
)
from gradwire.dsl.program import Program

from ..library.exponent import LEAST, MOST, exp2, exponent


class natural_compression(
    Program, unbiased=True, unbiased_from=2.0**-126, nonexpansive=True
):
    """Nine bits an element, whatever the others are: a sign and a power of two.

    No scale is shared, so a block of large elements takes nothing from small ones.

    Args:
        block: Elements that a kernel takes at once, a multiple of 64; default 4096. It
            does not change the bytes.
        seed: The seed of the random numbers, a whole number from 0 to 2**32 - 1;
            default 0. They draw the rounding.

    >>> import torch
    >>> codec = natural_compression()
    >>> payload, _ = codec.encode(None, torch.tensor([4.0, -0.5, 0.0, 3.0]))
    >>> codec.decode(payload, torch.empty(4))[:3], payload.size_bytes
    (tensor([ 4.0000, -0.5000,  0.0000]), 5)
    """

    block: int = 4096
    seed: int = 0

    def encode(self, gradient: Vector) -> Compressed:
        return concat(
            signs=map(gradient, lambda x: uint1(x < 0)),
            exponents=map(gradient, lambda x: uint8(_power(x) - LEAST)),
        )

    def decode(self, compressed: Compressed) -> Vector:
        signs, exponents = extract(compressed)
        return map(
            (signs, exponents),
            lambda sign, code: where(
                sign == 1, -exp2(code + LEAST), exp2(code + LEAST)
            ),
        )


def _power(x: Scalar) -> Scalar:
    """The exponent that is sent for an element; it is the higher one as often as x is
    near it.
    """
    below = exponent(x)
    goes_up = (abs(x) - exp2(below) > random(0, 1) * exp2(below)) & (below > LEAST)
    above = smaller(where(goes_up, below + 1, below), MOST - 1)
    return where(below == MOST, MOST, above)


EXAMPLES = (natural_compression(), natural_compression(block=64))
