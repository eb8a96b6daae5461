"""Compressors of the paper (and two more) in the language: what the tests of dsl run."""

from __future__ import annotations

from gradwire.dsl.language import (
    Compressed,
    Scalar,
    Vector,
    add,
    concat,
    extract,
    filter,
    finite,
    floor,
    greater,
    map,
    random,
    reduce,
    round,
    size,
    smaller,
    sqrt,
    uint,
    uint1,
    uint2,
    uint8,
    where,
)
from gradwire.dsl.program import Program


class onebit(Program, contraction=True, error_feedback=True):
    """The sign of an element, decoded to the mean of its side (Seide et al. 2014)."""

    block: int = 65536

    def encode(self, gradient: Vector) -> Compressed:
        low = mean(filter(gradient, lambda x: ~(x >= 0)))
        high = mean(filter(gradient, lambda x: x >= 0))
        return concat(low=low, high=high, bits=map(gradient, lambda x: uint1(x >= 0)))

    def decode(self, compressed: Compressed) -> Vector:
        low, high, bits = extract(compressed)
        return map(bits, lambda bit: where(bit == 1, high, low))


def mean(vector: Vector) -> Scalar:
    """The mean of the elements; 0 of none."""
    return where(size(vector) > 0, reduce(vector, add) / size(vector), 0.0)


class tbq(Program, contraction=True, error_feedback=True):
    """0 or +-threshold in two bits (Strom 2015); the fourth code carries what is not finite."""

    threshold: float = 0.05

    def encode(self, gradient: Vector) -> Compressed:
        def code(x: Scalar) -> Scalar:
            sign = where(x >= self.threshold, 1, where(x <= -self.threshold, 2, 0))
            return uint2(where(finite(x), sign, 3))

        return concat(codes=map(gradient, code))

    def decode(self, compressed: Compressed) -> Vector:
        (codes,) = extract(compressed)

        def value(code: Scalar) -> Scalar:
            known = where(code == 1, self.threshold, where(code == 2, -self.threshold, 0.0))
            return where(code == 3, float("nan"), known)

        return map(codes, value)


class uniform(Program, unbiased=True):
    """Figure 5's "TernGrad": 2^bitwidth even levels from min to max, rounded at random."""

    bitwidth: int = 2
    seed: int = 0

    def encode(self, gradient: Vector) -> Compressed:
        low, high = reduce(gradient, smaller), reduce(gradient, greater)
        gap = (high - low) / ((1 << self.bitwidth) - 1)
        per_gap, level = 1 / gap, uint(self.bitwidth)
        codes = map(gradient, lambda x: level(floor((x - low) * per_gap + random(0, 1))))
        return concat(low=low, gap=gap, codes=codes)

    def decode(self, compressed: Compressed) -> Vector:
        low, gap, codes = extract(compressed)
        return map(codes, lambda code: low + code * gap)


class terngrad(Program, unbiased=True):
    """{-1, 0, 1} times max|g|, non-zero with probability |g| / max|g| (Wen et al. 2017)."""

    seed: int = 0

    def encode(self, gradient: Vector) -> Compressed:
        top = reduce(map(gradient, abs), greater)
        return concat(
            top=top,
            codes=map(
                gradient,
                lambda x: uint2(where(abs(x) > random() * top, where(x > 0, 2, 0), 1)),
            ),
        )

    def decode(self, compressed: Compressed) -> Vector:
        top, codes = extract(compressed)
        return map(codes, lambda code: (code - 1) * top)


class qsgd(Program, unbiased=True):
    """Levels of |g| / norm rounded at random, with a sign (Alistarh et al. 2017)."""

    bitwidth: int = 4
    block: int = 512
    seed: int = 0

    def encode(self, gradient: Vector) -> Compressed:
        levels = (1 << (self.bitwidth - 1)) - 1
        norm = sqrt(reduce(map(gradient, lambda x: x * x), add))
        per_norm = levels / norm

        def code(x: Scalar) -> Scalar:
            level = floor(abs(x) * per_norm + random())
            return uint(self.bitwidth)(levels + where(x < 0, -level, level))

        return concat(norm=norm, codes=map(gradient, code))

    def decode(self, compressed: Compressed) -> Vector:
        norm, codes = extract(compressed)
        levels = (1 << (self.bitwidth - 1)) - 1
        return map(codes, lambda code: (code - levels) * (norm / levels))


class int8(Program, contraction=True, error_feedback=True):
    """The nearest of 255 even levels up to the largest magnitude of a block."""

    block: int = 4096

    def encode(self, gradient: Vector) -> Compressed:
        top = reduce(map(gradient, abs), greater)
        per_step = 127 / top
        codes = map(gradient, lambda x: uint8(round(x * per_step) + 127))
        return concat(step=top / 127, codes=codes)

    def decode(self, compressed: Compressed) -> Vector:
        step, codes = extract(compressed)
        return map(codes, lambda code: (code - 127) * step)


EXAMPLES = (
    onebit(),
    onebit(block=64),
    tbq(),
    uniform(),
    uniform(bitwidth=8, block=128),
    terngrad(),
    qsgd(),
    int8(),
)
