"""onebit: the sign of every element, decoded to the mean of its side.

Source: Seide et al., Interspeech 2014, section 3; HiPress section 4.4.
Differences: the two means are taken over blocks of 512 elements instead of columns of a matrix; the
    header is 8 bytes a block. Larger blocks are no faster and train worse: their mean is that of
    elements which differ more. A block stays in the cache between the pass that averages and the
    pass that encodes, so a gradient is read from memory once. A NaN counts as negative. A side
    whose sum leaves float32's range (elements beyond 5e33) decodes to infinity.
    Generated code took the place of a hand-written kernel: as fast with a residual, 0.7 to 0.83 as
    fast without one, where the sums in double precision are what it waits for.
Wire: low_B float32 (mean of the negatives), high_B float32 (mean of the others), bits_N (1: not
    negative, bit i of byte j is element 8j+i) -> 8 * ceil(N / block) + ceil(N / 8) bytes.
State: none. Contributed: the decoded gradient.
"""

from __future__ import annotations

from ..dsl.language import (
    Compressed,
    Scalar,
    Vector,
    add,
    concat,
    extract,
    map,
    reduce,
    size,
    uint1,
    where,
)
from ..dsl.program import Program
from ..errors import invalid


class onebit(Program, contraction=True, error_feedback=True):
    """One bit an element, two means a block.

    ``block`` is the number of elements that share their two means, a multiple of 64.

    >>> import torch
    >>> codec = onebit()
    >>> payload, _ = codec.encode(None, torch.tensor([-1.0, -3.0, 2.0, 4.0]))
    >>> codec.decode(payload, torch.empty(4)), payload.size_bytes
    (tensor([-2., -2.,  3.,  3.]), 9)
    """

    stretch: float = 1.5
    block: int = 128

    def check(self) -> None:
        if not 1 <= self.stretch < 2:
            raise invalid("onebit stretch", self.stretch, "from 1 to below 2", "write 1.5")

    def encode(self, gradient: Vector) -> Compressed:
        num_above = reduce(map(gradient, lambda x: where(x >= 0, 1, 0)), add)
        below = map(gradient, lambda x: where(x >= 0, 0.0, x))
        above = map(gradient, lambda x: where(x >= 0, x, 0.0))
        return concat(
            low=self.stretch * _mean(below, size(gradient) - num_above),
            high=self.stretch * _mean(above, num_above),
            bits=map(gradient, lambda x: uint1(x >= 0)),
        )

    def decode(self, compressed: Compressed) -> Vector:
        low, high, bits = extract(compressed)
        return map(bits, lambda bit: where(bit == 1, high, low))


def _mean(vector: Vector, count: Scalar) -> Scalar:
    """The mean of ``count`` elements, the others being 0; 0 of none."""
    return where(count > 0, reduce(vector, add) / count, 0.0)


EXAMPLES = (onebit(), onebit(block=64))
