"""adacomp: in every bin, all that one more gradient would make the bin's largest.

Source: Chen, Choi, Brand, Agrawal, Zhang, Gopalakrishnan, AAAI 2018, "AdaComp: adaptive
    residual gradient compression for data-parallel distributed training", algorithms 1
    and 2; HiPress section 4.4. With G the residual plus the latest gradient dW, an
    element is sent where |G + dW| is at least the largest |G| of its bin, as sign(G)
    times the mean of those largest.
Differences: bins are multiples of 64 elements, where the paper has 50 for convolutions
    and 500 for the rest: ``block`` 64 and 512 are nearest. Indices travel as int32 and
    signs as bits, instead of both in 8 or 16 bits an element by its place in its bin.
    Zeros are never sent, nor a bin of them; a bin with a NaN is sent whole. Without a
    residual G is dW, and what reaches half of its bin's largest is sent. No ring
    carries it: each hop would select again from the sum so far (HiPress, section 5.3),
    and means would lack more of the gradients than the law of dense means allows.
Default: the paper's larger bins. Bins of so many elements send too little of a
    transformer's matrices: 400 steps of a small GPT end 52 % behind dense, 39 % with
    ``block=128`` (docs/measured.md).
Wire: level float32, indices_K int32 ascending, signs_K uint1 -> 4 + 4 * K + ceil(K / 8)
    bytes, K at most N; about 5 a bin, by the paper's compression rates.
State: none. Contributed: what was sent. That is not nonexpansive: a bin of small
    elements is sent at the mean of all bins, and may be farther from its values
    afterwards than zeros were.
"""

from gradwire.contract import Layout
from gradwire.contract.payload import Format
from gradwire.contract.spec import TensorSpec
from gradwire.dsl.language import (
    Compressed,
    Scattered,
    Vector,
    add,
    concat,
    extract,
    filter,
    greater,
    indices,
    map,
    reduce,
    scatter,
    size,
    uint1,
    where,
    whole,
)
from gradwire.dsl.program import Program

_SENT_A_BIN = 5


class adacomp(
    Program,
    layout=Layout.SPARSE,
    exact_size=False,
    error_feedback=True,
    reads_latest=True,
):
    """Sends signs of as many elements as the residuals call for, and one magnitude.

    Args:
        block: The length of a bin in elements, the paper's T: a multiple of 64; default
            512. Longer bins send less and lose more.

    >>> import torch
    >>> codec = adacomp(block=64)
    >>> payload, _ = codec.encode(None, torch.tensor([0.1, -4.0, 2.0, 1.0]))
    >>> payload["indices"].tolist(), codec.decode(payload, torch.empty(4))
    ([1, 2], tensor([ 0., -4.,  4.,  0.]))
    """

    block: int = 512

    def typical(self, spec: TensorSpec) -> Format:
        num_bins = -(-spec.numel // self.block)
        form: Format = self.holding(spec, _SENT_A_BIN * num_bins)
        return form

    def encode(self, gradient: Vector, latest: Vector) -> Compressed:
        most = reduce(map(gradient, abs), greater)
        num_bins = whole(where(size(gradient) > 0, 1, 0), add)
        due = map((gradient, latest), lambda g, d: where(abs(g + d) < most, 0.0, g))
        sent = filter(due, lambda g: ~(g == 0))
        return concat(
            level=whole(most, add) / num_bins,
            indices=indices(sent),
            signs=map(sent, lambda g: uint1(g > 0)),
        )

    def decode(self, compressed: Compressed) -> Scattered:
        level, places, signs = extract(compressed)
        return scatter(places, map(signs, lambda sign: where(sign == 1, level, -level)))


EXAMPLES = (adacomp(), adacomp(block=64))
