"""tbq: an element becomes 0 or plus or minus a fixed threshold, in two bits.

Source: Strom, Interspeech 2015, section 3; HiPress section 4.4 (threshold binary
quantisation).
Differences: a code for every element, as in HiPress, where Strom sends the indices of
    those beyond the threshold: 2 bits an element whatever the threshold lets pass. The
    fourth code carries what is not finite: inf and NaN decode to NaN, and their
    residual keeps its old value.
Default: none that suits every model. A step moves an element by one threshold at most,
    so what is larger queues up, and what is smaller waits. No threshold suits all
    layers of a model: 200 steps of
    ``gradwire bench train --task convnet --optimizer sgd`` end at 1.9 times the dense
    loss with 0.05, and at 2.0 with 0.01 and 0.2. In as many bits ``threelc`` ends at
    0.98, as its scales are those of the gradient.
Wire: codes_N in 2 bits (0: zero, 1: threshold, 2: -threshold, 3: NaN; code i in bits 2
    * (i % 4) of byte i // 4) -> ceil(N / 4) bytes.
State: none. Contributed: the decoded gradient.
"""

import math

from gradwire.dsl.language import (
    Compressed,
    Scalar,
    Vector,
    concat,
    extract,
    finite,
    map,
    uint2,
    where,
)
from gradwire.dsl.program import Program

from ._positive import check_positive


class tbq(Program, nonexpansive=True, error_feedback=True):
    """Two bits an element: whether it reaches ``threshold``, and on which side.

    Args:
        threshold: The magnitude of each element that is sent, in units of the gradient:
            a finite number above 0; default 0.05. The rest of an element stays in the
            residual. A larger threshold sends an element less often, and more at once.
            It does not change the bytes.
        block: Elements that a kernel takes at once, a multiple of 64; default 16384. It
            does not change the bytes.

    >>> import torch
    >>> codec = tbq(threshold=0.5)
    >>> payload, _ = codec.encode(None, torch.tensor([0.75, -0.25, -2.0, 0.5]))
    >>> codec.decode(payload, torch.empty(4)), payload.size_bytes
    (tensor([ 0.5000,  0.0000, -0.5000,  0.5000]), 1)
    """

    threshold: float = 0.05

    def check(self) -> None:
        check_positive("tbq threshold", self.threshold, "write threshold=0.05")

    def encode(self, gradient: Vector) -> Compressed:
        def code(x: Scalar) -> Scalar:
            side = where(x >= self.threshold, 1, where(x <= -self.threshold, 2, 0))
            return uint2(where(finite(x), side, 3))

        return concat(codes=map(gradient, code))

    def decode(self, compressed: Compressed) -> Vector:
        (codes,) = extract(compressed)

        def value(code: Scalar) -> Scalar:
            side = where(
                code == 1, self.threshold, where(code == 2, -self.threshold, 0.0)
            )
            return where(code == 3, math.nan, side)

        return map(codes, value)


EXAMPLES = (tbq(), tbq(threshold=0.5))
