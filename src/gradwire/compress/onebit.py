"""onebit: the sign of every element, decoded to the stretched mean of its side.

Source: Seide et al., Interspeech 2014, section 3; HiPress section 4.4.
Differences: the two means are taken over blocks of 128 elements instead of columns of a
    matrix; the header is 8 bytes a block. And they are ``stretch`` times the means, 1
    in the papers. A mean loses least in one step, but no step moves an element by more
    than it. An element whose gradient is larger waits until error feedback has made its
    whole side so large, so one outlier delays its block for hundreds of steps. Values
    above the mean end that at the price of more noise, which error feedback takes back
    in the next steps. Below 2 no more is lost than there was. A block stays in the
    cache between the pass that averages and the pass that encodes, so a gradient is
    read from memory once. A NaN counts as negative. A side whose sum leaves float32's
    range (elements beyond 5e33) decodes to infinity. ``casync_ps`` stretches twice,
    gradients and their mean, so steps are up to twice as long as dense ones. Near the
    largest learning rate that dense training bears, a training then diverges: a
    perceptron of 8 ranks at 0.1, where stretch 1 and 1.35 train. Take ``stretch=1``
    there, or a lower rate. A mean without stretch ends the task convnet at 1.15 of
    dense, and not at 0.98. Generated code took the place of a hand-written kernel: as
    fast with a residual, 0.7 to 0.83 as fast without one, where the sums in double
    precision are what it waits for.
Default: 200 steps of ``gradwire bench train --optimizer sgd`` end at 1.00 (tasks
    convnet and lstm) and 1.07 (gpt) of the dense loss, with the papers' means of 512
    elements at 1.54 (convnet) and 1.51 (gpt). Under AdamW they end at 1.21, 1.24 and
    1.16: Adam divides each element by the root of its second moment, and an error that
    is even over a block is large there where gradients are small.
Wire: low_B float32 (stretch times the mean of the negatives), high_B float32 (of the
    others), bits_N (1: not negative, bit i of byte j is element 8j+i) -> 8 * ceil(N /
    block) + ceil(N / 8) bytes.
State: none. Contributed: the decoded gradient.
"""

from __future__ import annotations

from dataclasses import replace

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


class onebit(Program, nonexpansive=True, error_feedback=True):
    """One bit an element, two means a block.

    Args:
        stretch: The factor of both means, from 1 to below 2; default 1.5. 1 is the
            paper's. A larger factor lets large elements of a block wait for fewer
            steps, and adds noise. It is 1 throughout ``casync_ring``, where the factors
            of all ranks would multiply.
        block: The number of elements that share two means, a multiple of 64; default
            128. A block has 8 bytes for them. Shorter blocks lose less and send more.

    >>> import torch
    >>> codec = onebit(stretch=1.5)
    >>> payload, _ = codec.encode(None, torch.tensor([-1.0, -3.0, 2.0, 4.0]))
    >>> codec.decode(payload, torch.empty(4)), payload.size_bytes
    (tensor([-3.0000, -3.0000,  4.5000,  4.5000]), 9)
    """

    stretch: float = 1.5
    block: int = 128

    def check(self) -> None:
        if not 1 <= self.stretch < 2:
            raise invalid(
                "onebit stretch", self.stretch, "from 1 to below 2", "write 1.5"
            )

    def for_sums(self) -> onebit:
        return replace(self, stretch=1.0)

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


EXAMPLES = (onebit(), onebit(stretch=1.0, block=64))
