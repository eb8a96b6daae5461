"""int8: the nearest of 255 even levels up to a block's largest, a byte an element.

Source: Dettmers et al., ICLR 2022 (8-bit optimizers), section 2.1: block-wise
    quantisation, each block of 4096 by its largest magnitude.
Differences: even levels, for which an encoder needs no table, instead of the paper's
    dynamic tree. Blocks whose largest magnitude is below 3.8e-37 are sent as zeros.
Wire: step_B float32 (from one level to the next), codes_N uint8 (level + 127) -> 4 *
    ceil(N / block) + N bytes.
State: none. Contributed: the decoded gradient.
"""

from ..dsl.language import (
    Compressed,
    Vector,
    concat,
    extract,
    greater,
    map,
    reduce,
    round,
    uint8,
)
from ..dsl.program import Program
from ._quantise import inverse


class int8(Program, nonexpansive=True, error_feedback=True):
    """Eight bits an element: the nearest multiple of a 127th of the block's largest.

    Args:
        block: The number of elements that share a scale, a multiple of 64; default
            4096. A block has 4 bytes for it. Shorter blocks lose less and send more.

    >>> import torch
    >>> codec = int8()
    >>> payload, _ = codec.encode(None, torch.tensor([127.0, -1.75, 0.25]))
    >>> codec.decode(payload, torch.empty(3)), payload.size_bytes
    (tensor([127.,  -2.,   0.]), 7)
    """

    block: int = 4096

    def encode(self, gradient: Vector) -> Compressed:
        top = reduce(map(gradient, abs), greater)
        per_step = inverse(top, 127)
        codes = map(gradient, lambda x: uint8(round(x * per_step) + 127))
        return concat(step=top / 127, codes=codes)

    def decode(self, compressed: Compressed) -> Vector:
        step, codes = extract(compressed)
        return map(codes, lambda code: (code - 127) * step)


EXAMPLES = (int8(), int8(block=64))
