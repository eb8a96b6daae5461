"""dgc: the largest elements by magnitude, by a threshold that a small sample gives.

Source: Lin et al., ICLR 2018, "Deep Gradient Compression", section 3.1 and appendix B
    (sampled threshold, hierarchical selection); HiPress table 5.
Differences: of the paper this is the encoding alone; momentum correction, clipping,
    momentum factor masking and the warm-up of density are wrappers of exchanges, and
    with them it is ``gw.deep_gradient_compression``. The sample is drawn with
    replacement (``sample_share`` of the gradient, and at least 64 / density draws); a
    gradient of no more elements than that is looked at whole. What reaches the
    threshold passes, equal to it or greater, but for zeros: strictly greater would
    never send a tensor of one element. If more than k = max(1, round(density * N))
    pass, the k largest of them are selected exactly, by magnitude, ties to the lowest
    index. If fewer pass, fewer are sent: more than density * N / 2, but once in 10^6
    calls, of a gradient with as many that are not 0. With density 1 all that is not 0
    passes.
Default: density 0.01 is the literature's, for long trainings. The first 400 steps of a
    small GPT end 37 to 40 % behind dense with it, as an element waits for 100 steps
    (docs/measured.md).
Wire: indices_K int32 ascending, values_K float32 -> 8 * K bytes, K <= k.
State: (stream, step) of the random sample. Contributed: the elements sent.
"""

from gradwire.contract import Layout
from gradwire.contract.bounds import check_share
from gradwire.dsl.language import (
    Compressed,
    Scattered,
    Vector,
    concat,
    extract,
    indices,
    scatter,
    top,
)
from gradwire.dsl.program import Program

from ._sampled import reaching


class dgc(
    Program,
    layout=Layout.SPARSE,
    exact_size=False,
    nonexpansive=True,
    error_feedback=True,
    density_range=(0.5, 1.0),
):
    """Sends at most the ``density`` share of elements, those of largest magnitude.

    Args:
        density: The kept fraction k/n, in (0, 1]; default 0.01. A larger one sends more
            bytes, and elements wait for fewer steps.
        sample_share: The fraction of the gradient that is sampled for the threshold, in
            (0, 1]; default 0.001. A larger one meets the density more closely and takes
            longer. Small gradients have a larger sample.
        seed: The seed of the random numbers, a whole number from 0 to 2**32 - 1;
            default 0. They draw the sample.
        block: Elements that a kernel takes at once, a multiple of 64; default 16384. It
            does not change the bytes.

    >>> import torch
    >>> codec = dgc(density=0.5)
    >>> payload, _ = codec.encode(None, torch.tensor([1.0, -4.0, 2.0, 3.0]))
    >>> payload["indices"], codec.decode(payload, torch.empty(4))
    (tensor([1, 3], dtype=torch.int32), tensor([ 0., -4.,  0.,  3.]))
    """

    density: float = 0.01
    sample_share: float = 0.001
    seed: int = 0

    def check(self) -> None:
        check_share("dgc density", self.density)
        check_share("dgc sample_share", self.sample_share)

    def encode(self, gradient: Vector) -> Compressed:
        kept = top(reaching(gradient, self.density, self.sample_share), self.density)
        return concat(indices=indices(kept), values=kept)

    def decode(self, compressed: Compressed) -> Scattered:
        return scatter(*extract(compressed))


EXAMPLES = (dgc(), dgc(density=0.3), dgc(density=1.0, sample_share=0.01))
