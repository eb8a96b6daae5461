"""graddrop: drops elements of small magnitude, by a threshold of a small sample.

Source: Aji and Heafield, EMNLP 2017, "Sparse communication for distributed gradient
    descent", section 3; HiPress table 5.
Differences: ``density`` is the share kept, where the paper counts what is dropped; one
    threshold a tensor (its "local" threshold). The sample (``sample_share``, 0.1 % as
    there) is drawn with replacement, and of small tensors is at least 64 / density
    draws, or all elements if they are no more. What reaches the threshold passes, equal
    to it or greater, but for zeros. Never more than twice the density is sent, so that
    memory is bounded: then the largest are selected exactly. Unlike ``dgc`` it
    otherwise sends all that pass: more than density * N / 2, but once in 10^6 calls, of
    a gradient with as many elements that are not 0.
Default: density 0.01 is the literature's, for long trainings. The first 400 steps of a
    small GPT end 37 to 40 % behind dense with it, as an element waits for 100 steps
    (docs/measured.md).
Wire: indices_K int32 ascending, values_K float32 -> 8 * K bytes, K <= max(1, round(2
density * N)).
State: (stream, step) of the random sample. Contributed: the elements sent.
"""

from gradwire.contract import Layout
from gradwire.contract.bounds import check_share
from gradwire.contract.payload import Format
from gradwire.contract.spec import TensorSpec
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


class graddrop(
    Program,
    layout=Layout.SPARSE,
    exact_size=False,
    nonexpansive=True,
    error_feedback=True,
    density_range=(0.5, 2.0),
):
    """Sends about the ``density`` share of elements, those of largest magnitude.

    Args:
        density: The kept fraction k/n, in (0, 1]; default 0.01. A larger one sends more
            bytes, and elements wait for fewer steps. Never more than twice as much is
            sent.
        sample_share: The fraction of the gradient that is sampled for the threshold, in
            (0, 1]; default 0.001. A larger one meets the density more closely and takes
            longer. Small gradients have a larger sample.
        seed: The seed of the random numbers, a whole number from 0 to 2**32 - 1;
            default 0. They draw the sample.
        block: Elements that a kernel takes at once, a multiple of 64; default 16384. It
            does not change the bytes.

    >>> import torch
    >>> codec = graddrop(density=0.5)
    >>> payload, _ = codec.encode(None, torch.tensor([1.0, -4.0, 2.0]))
    >>> codec.decode(payload, torch.empty(3))
    tensor([ 0., -4.,  2.])
    """

    density: float = 0.01
    sample_share: float = 0.001
    seed: int = 0

    def check(self) -> None:
        check_share("graddrop density", self.density)
        check_share("graddrop sample_share", self.sample_share)

    def typical(self, spec: TensorSpec) -> Format:
        usual: Format = self.holding(spec, max(1, round(self.density * spec.numel)))
        return usual

    def encode(self, gradient: Vector) -> Compressed:
        passed = reaching(gradient, self.density, self.sample_share)
        kept = top(passed, min(1.0, 2 * self.density))
        return concat(indices=indices(kept), values=kept)

    def decode(self, compressed: Compressed) -> Scattered:
        return scatter(*extract(compressed))


EXAMPLES = (graddrop(), graddrop(density=0.3), graddrop(density=1.0, sample_share=0.01))
