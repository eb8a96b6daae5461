"""terngrad: signs of random elements, times the largest magnitude of a block.

Source: Wen et al., NeurIPS 2017, algorithm 1 and equations 1 to 4; gradient clipping:
section 3.3.
Differences: the largest magnitude is taken over blocks of 128 elements instead of a
    layer, and each rank keeps its own (no scaler sharing), as payloads are decoded
    before they are summed. The deviation that clipping goes by is the block's, about
    zero and not about the mean: elements that are all equal would else be clipped to
    nothing.
Default: clipping at 1.5 deviations (the paper's is at 2.5 of a layer's). It shrinks
    what lies beyond, so the result is not unbiased; without it one outlier turns all of
    its block to noise. 200 steps of ``gradwire bench train`` end at 1.08 of the dense
    loss (task convnet, SGD) and 1.02 (gpt, AdamW), without clipping at 1.52 and 1.06.
    The noise has no error feedback that takes it back: half of the learning rate ends
    the same convnet at 1.17 without clipping.
Wire: top_B float32, codes_N in 2 bits (0: -top, 1: zero, 2: top; code i in bits 2 * (i
    % 4) of byte i // 4) -> 4 * ceil(N / block) + ceil(N / 4) bytes.
State: (stream, step) of the random numbers. Contributed: the decoded gradient.
"""

from dataclasses import replace

from gradwire.compress._quantise import lift
from gradwire.contract import Traits
from gradwire.dsl.language import (
    Compressed,
    Scalar,
    Vector,
    add,
    concat,
    extract,
    greater,
    map,
    random,
    reduce,
    size,
    smaller,
    sqrt,
    uint2,
    where,
)
from gradwire.dsl.program import Program

from ._positive import check_positive


class terngrad(Program, unbiased=True):
    """-1, 0 or 1 times the largest magnitude; not 0 with probability |x| / largest.

    Args:
        clip: The number of standard deviations at which elements are cut off first, a
            number above 0; default 1.5. A smaller one makes the variance smaller, and
            the trait ``unbiased`` is False. None: no clipping, and ``unbiased`` is
            True. It does not change the bytes.
        block: The number of elements that share a largest magnitude, a multiple of 64;
            default 128. A block has 4 bytes for it. Shorter blocks lose less and send
            more.
        seed: The seed of the random numbers, a whole number from 0 to 2**32 - 1;
            default 0. They draw the elements that are not 0.

    >>> import torch
    >>> codec = terngrad()
    >>> payload, _ = codec.encode(None, torch.tensor([3.0, 0.0, -3.0, 3.0]))
    >>> codec.decode(payload, torch.empty(4)), payload.size_bytes
    (tensor([ 3.,  0., -3.,  3.]), 5)
    >>> codec.traits.unbiased, terngrad(clip=None).traits.unbiased
    (False, True)
    """

    clip: float | None = 1.5
    block: int = 128
    seed: int = 0

    def check(self) -> None:
        if self.clip is not None:
            check_positive(
                "terngrad clip", self.clip, "write clip=1.5, or None for no clipping"
            )

    def stated(self) -> Traits:
        return replace(type(self).traits, unbiased=self.clip is None)

    def encode(self, gradient: Vector) -> Compressed:
        top = reduce(map(gradient, abs), greater)
        if self.clip is not None:
            top = _clipped(top, gradient, self.clip)
        lifted = lift(top)
        bound = top * lifted

        def code(x: Scalar) -> Scalar:
            is_sent = abs(x) * lifted > random(0, 1) * bound
            return uint2(where(is_sent, where(x > 0, 2, 0), 1))

        return concat(top=top, codes=map(gradient, code))

    def decode(self, compressed: Compressed) -> Vector:
        top, codes = extract(compressed)
        return map(codes, lambda code: (code - 1) * top)


def _clipped(top: Scalar, gradient: Vector, clip: float) -> Scalar:
    """The scale of a block that is cut off.

    An element beyond the scale is sent as the scale.
    """
    mean_square = reduce(map(gradient, lambda x: x * x), add) / size(gradient)
    limit = clip * sqrt(mean_square)
    return where(limit > 0, smaller(top, limit), top)  # squares of tiny elements are 0


EXAMPLES = (terngrad(), terngrad(clip=None, block=64))
