"""uniform: even levels from a block's smallest to its largest, rounded at random.

Source: HiPress figure 5, where this stochastic min/max quantiser is called TernGrad;
    Wen et al.'s own is ``terngrad`` here.
Differences: smallest and largest are taken over blocks of 512 elements instead of the
    gradient. The default is 4 bits where figure 5 has 2: with 2, a transformer does
    not train. The bit width and the padding are not sent, as the receiver knows both;
    figure 5's count of padding elements is right for two bits only. The smallest
    element is sent with the width of a level, as the largest is not needed again.
Wire: low_B float32, gap_B float32 (from one level to the next), codes_N in ``bitwidth``
    bits, the first in the lowest bits of a byte -> 8 * ceil(N / block) + ceil(bitwidth
    * N / 8) bytes.
State: (stream, step) of the random numbers. Contributed: the decoded gradient.
"""

from dataclasses import replace

from ..contract import Traits
from ..contract.bounds import check_choice
from ..dsl.language import (
    Compressed,
    Vector,
    concat,
    extract,
    floor,
    greater,
    map,
    random,
    reduce,
    smaller,
    uint,
)
from ..dsl.program import Program
from ._quantise import divisible, inverse, lift

BITWIDTHS = (1, 2, 4, 8)


class uniform(Program, unbiased=True):
    """Rounds each element at random to one of 2**bitwidth even levels.

    An element between two levels goes to one of them, more often to the nearer one. So
    its expectation is the element itself.

    Args:
        bitwidth: Bits for each element: 1, 2, 4 (the default) or 8. More bits send more
            and lose less.
        block: The number of elements that share smallest and largest level, a multiple
            of 64; default 512. A block has 8 bytes for both levels. Shorter blocks lose
            less and send more.
        seed: The seed of the random numbers, a whole number from 0 to 2**32 - 1;
            default 0. They draw the rounding.

    >>> import torch
    >>> codec = uniform(bitwidth=2)
    >>> payload, _ = codec.encode(None, torch.tensor([0.0, 1.0, 2.0, 3.0]))
    >>> codec.decode(payload, torch.empty(4)), payload.size_bytes
    (tensor([0., 1., 2., 3.]), 9)
    """

    bitwidth: int = 4
    block: int = 512
    seed: int = 0

    def check(self) -> None:
        check_choice("uniform bitwidth", self.bitwidth, BITWIDTHS)

    def stated(self) -> Traits:
        """An element's error is at most a gap, which is (largest - smallest) / gaps.

        A block's largest and smallest differ by at most sqrt(2) times its norm.
        """
        return replace(type(self).traits, nonexpansive=2 * self.block <= self.gaps**2)

    @property
    def gaps(self) -> int:
        """Steps from the smallest element to the largest."""
        return (1 << self.bitwidth) - 1

    def encode(self, gradient: Vector) -> Compressed:
        low = reduce(gradient, smaller)
        high = reduce(gradient, greater)
        gap = divisible(high - low, self.gaps) / self.gaps
        lifted = lift(gap)
        per_gap = inverse(gap * lifted)
        level = uint(self.bitwidth)
        codes = map(
            gradient,
            lambda x: level(floor((x - low) * lifted * per_gap + random(0, 1))),
        )
        return concat(low=low, gap=gap, codes=codes)

    def decode(self, compressed: Compressed) -> Vector:
        low, gap, codes = extract(compressed)
        return map(codes, lambda code: low + code * gap)


EXAMPLES = (uniform(), uniform(bitwidth=8, block=128))
