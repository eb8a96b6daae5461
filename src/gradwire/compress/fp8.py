"""fp8: 8-bit floats, scaled by the largest magnitude of a block.

Source: Micikevicius et al., arXiv 2209.05433 (FP8 formats for deep learning): e4m3,
    with four exponent bits and three of fraction, scaled by the largest magnitude.
Differences: a scale for each block of 4096 elements instead of one for a tensor. Blocks
    whose largest magnitude is below 1.4e-36 are sent as zeros.
Wire: step_B float32 (what a code of 1.0 stands for), codes_N uint8 (e4m3) -> 4 * ceil(N
    / block) + N bytes.
State: none. Contributed: the decoded gradient.
"""

from ..dsl.e4m3 import from_e4m3, to_e4m3
from ..dsl.language import Compressed, Vector, concat, extract, greater, map, reduce
from ..dsl.program import Program
from ._quantise import inverse

_LARGEST = 448.0
"""The largest e4m3 number."""


class fp8(Program, nonexpansive=True, error_feedback=True):
    """Eight bits an element: four bits of precision.

    They reach down to a 28672th of the largest magnitude.

    Unlike ``int8`` it keeps the small elements of a block with a large one.

    Args:
        block: The number of elements that share a scale, a multiple of 64; default
            4096. A block has 4 bytes for it. Shorter blocks lose less and send more.

    >>> import torch
    >>> codec = fp8()
    >>> payload, _ = codec.encode(None, torch.tensor([448.0, -1.1, 0.01]))
    >>> codec.decode(payload, torch.empty(3)), payload.size_bytes
    (tensor([ 4.4800e+02, -1.1250e+00,  9.7656e-03]), 7)
    """

    block: int = 4096

    def encode(self, gradient: Vector) -> Compressed:
        top = reduce(map(gradient, abs), greater)
        per_step = inverse(top, _LARGEST)
        return concat(
            step=top / _LARGEST, codes=map(gradient, lambda x: to_e4m3(x * per_step))
        )

    def decode(self, compressed: Compressed) -> Vector:
        step, codes = extract(compressed)
        return map(codes, lambda code: from_e4m3(code) * step)


EXAMPLES = (fp8(), fp8(block=64))
