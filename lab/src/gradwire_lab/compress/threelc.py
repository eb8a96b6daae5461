"""threelc (3LC): three values an element, five elements a byte, runs of zeros a byte.

Source: Lim, Andersen, Kaminsky, SysML 2019: 3-value quantisation with sparsity
    multiplication (section 3.1), quartic encoding (3.2) and zero-run encoding (3.3);
    HiPress section 4.4.
Differences: the scale is that of a block of 64 elements and not of the tensor, as the
    largest element of many is far from most of them; and a gradient is read from memory
    once. Five elements share a byte by groups of 64 and runs end with their block, so
    that all blocks are coded at once; the code of zero is 0, which makes the byte of
    five zeros 0, not 121.
Default: the shortest blocks there are. 200 steps of
    ``gradwire bench train --optimizer sgd`` end at 0.98 (task convnet), 1.00 (lstm) and
    1.02 (gpt) of the dense loss. Under AdamW, whose second moment sees the errors, 400
    steps of the GPT end 12 % behind (docs/measured.md). An element is off by up to half
    of its block's largest, and with ``sparsity=1.75``, 61 % behind, by nearly all of
    it.
Wire: level float32 a block, codes_lengths int32 a block, codes: at most 13 bytes a
    group of 64 (n bytes for the last n < 13) -> at most 8 * ceil(N / block) + 13 * (N
    // 64) + min(N % 64, 13) bytes, at least a fourteenth of the codes' bytes.
State: none. Contributed: the decoded gradient.
"""

from gradwire.contract import Layout
from gradwire.contract.payload import Format
from gradwire.contract.spec import TensorSpec
from gradwire.dsl.language import (
    Compressed,
    Scalar,
    Vector,
    concat,
    extract,
    greater,
    map,
    reduce,
    uint_3,
    where,
)
from gradwire.dsl.program import Program
from gradwire.errors import invalid

from ..library.zero_run import zero_run


class threelc(
    Program,
    layout=Layout.PACKED,
    exact_size=False,
    nonexpansive=True,
    error_feedback=True,
):
    """-1, 0 or 1 times ``sparsity`` times the largest magnitude of a block: the nearest
    of them.

    Args:
        sparsity: The factor of the largest magnitude, from 1 to below 2; default 1. It
            is the paper's s, which tries 1, 1.5, 1.75 and 1.9. A larger one makes more
            elements zero, so it sends less and loses more.
        block: The number of elements that share a largest magnitude, a multiple of 64;
            default 64. A block has 8 bytes beside its codes. Shorter blocks lose less
            and send more.

    >>> import torch
    >>> codec = threelc()
    >>> payload, _ = codec.encode(None, torch.tensor([4.0, -1.0, -3.0] + 50 * [0.5]))
    >>> payload["codes"].tolist(), payload.size_bytes
    ([1, 0, 2, 251], 12)
    >>> codec.decode(payload, torch.empty(53))[:4]
    tensor([ 4.,  0., -4.,  0.])
    """

    sparsity: float = 1.0
    block: int = 64

    def check(self) -> None:
        if not 1 <= self.sparsity < 2:
            raise invalid(
                "threelc sparsity", self.sparsity, "from 1 to below 2", "write 1.75"
            )

    def typical(self, spec: TensorSpec) -> Format:
        """Three quarters of the most bytes of codes in short blocks, half of them in
        longer ones.

        With sparsity 1 normal gradients take 0.92 of them in blocks of 64 and 0.72 in
        blocks of 16384, long tails 0.59 and 0.08.
        """
        largest: Format = self.format(spec)
        codes = largest.fields[-1]
        less = codes.numel // (4 if self.block <= 256 else 2)
        form: Format = self.received(spec, largest.size_bytes - less)
        return form

    def encode(self, gradient: Vector) -> Compressed:
        level = self.sparsity * reduce(map(gradient, abs), greater)
        half = level / 2

        def code(x: Scalar) -> Scalar:
            return uint_3(where(x > half, 1, where(x < -half, 2, 0)))

        return concat(level=level, codes=zero_run(map(gradient, code)))

    def decode(self, compressed: Compressed) -> Vector:
        level, codes = extract(compressed)
        return map(codes, lambda code: where(code == 2, -1, code) * level)


EXAMPLES = (threelc(), threelc(sparsity=1.75))
