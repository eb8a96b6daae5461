"""qsgd: fractions of a block's norm, rounded at random to even levels, with a sign.

Source: Alistarh et al., NeurIPS 2017, section 3.1 (equation 4) and 3.3 (buckets); its
    experiments have 4 bits and buckets of 512, and scale by the largest magnitude as
    ``norm="max"`` does here.
Differences: codes of a fixed width instead of Elias codes, which no vector unit packs.
    A bucket is called a block. The norm of section 3.1 is ``norm="l2"``: of more
    variance, so that the default is that of the experiments. Where that norm leaves
    float32's range (elements beyond 1e19, or all below 1e-19), the largest magnitude
    takes its place, under which the result is unbiased too.
Wire: norm_B float32, codes_N in ``bitwidth`` bits (level + sign * s around s =
    2**(bitwidth - 1) - 1, the first in the lowest bits of a byte) -> 4 * ceil(N /
    block) + ceil(bitwidth * N / 8) bytes.
State: (stream, step) of the random numbers. Contributed: the decoded gradient.
"""

from dataclasses import replace

from gradwire.compress._quantise import divisible, inverse, lift
from gradwire.contract import Compressor, Traits
from gradwire.contract.bounds import check_choice
from gradwire.dsl.language import (
    Compressed,
    Scalar,
    Vector,
    add,
    concat,
    extract,
    finite,
    floor,
    greater,
    map,
    random,
    reduce,
    sqrt,
    uint,
    where,
)
from gradwire.dsl.program import Program

BITWIDTHS = (2, 4, 8)


class qsgd(Program, unbiased=True):
    """``bitwidth`` bits an element: a sign and one of s = 2**(bitwidth - 1) - 1 levels.

    Args:
        bitwidth: Bits for each element: 2, 4 (the default) or 8. More bits send more
            and lose less.
        norm: The number by which a block is scaled. "max" (the default): its largest
            magnitude. "l2": its Euclidean norm, with which more elements are 0 and the
            variance is larger. It is "max" throughout ``casync_ring``, where the
            variances of all ranks would multiply.
        block: The number of elements that share a norm, a multiple of 64; default 512.
            A block has 4 bytes for it. Shorter blocks lose less and send more.
        seed: The seed of the random numbers, a whole number from 0 to 2**32 - 1;
            default 0. They draw the rounding.

    >>> import torch
    >>> codec = qsgd()
    >>> payload, _ = codec.encode(None, torch.tensor([7.0, -3.0, 0.0, 1.0]))
    >>> codec.decode(payload, torch.empty(4)), payload.size_bytes
    (tensor([ 7., -3.,  0.,  1.]), 6)
    """

    bitwidth: int = 4
    norm: str = "max"
    block: int = 512
    seed: int = 0

    def check(self) -> None:
        check_choice("qsgd bitwidth", self.bitwidth, BITWIDTHS)
        check_choice("qsgd norm", self.norm, ("l2", "max"))

    def for_sums(self) -> Compressor:
        """The form scaled by the largest magnitude, beyond which no element grows."""
        return replace(self, norm="max")

    def stated(self) -> Traits:
        """An element is off by a level at most.

        A block is off by norm / levels * sqrt(block) at most.
        """
        return replace(type(self).traits, nonexpansive=self.block <= self.levels**2)

    @property
    def levels(self) -> int:
        """The paper's s: levels above 0."""
        return (1 << (self.bitwidth - 1)) - 1

    def encode(self, gradient: Vector) -> Compressed:
        levels = self.levels
        norm = divisible(self._norm(gradient), levels)
        lifted = lift(norm)
        per_level = inverse(norm * lifted, levels)

        def code(x: Scalar) -> Scalar:
            level = floor(abs(x) * lifted * per_level + random(0, 1))
            return uint(self.bitwidth)(levels + where(x < 0, -level, level))

        return concat(norm=norm, codes=map(gradient, code))

    def _norm(self, gradient: Vector) -> Scalar:
        top = reduce(map(gradient, abs), greater)
        if self.norm == "max":
            return top
        norm = sqrt(reduce(map(gradient, lambda x: x * x), add))
        return where(finite(norm), greater(norm, top), top)

    def decode(self, compressed: Compressed) -> Vector:
        norm, codes = extract(compressed)
        return map(codes, lambda code: (code - self.levels) * (norm / self.levels))


EXAMPLES = (qsgd(), qsgd(norm="l2", bitwidth=2, block=64))
