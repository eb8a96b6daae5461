"""redsync: all above a threshold that is searched between mean and maximum.

Source: Fang, Fu, Yang, Hsieh, JPDC 2019, "RedSync: reducing synchronization bandwidth
    for distributed deep learning training system", section 5: *threshold binary
    search*, whose threshold mean + ratio * (max - mean) is right where between k and 2k
    elements reach it; and *trimmed top-k* for smaller tensors, exact among what passes
    a threshold lowered in steps.
Differences: trials cost nothing, as they look at a histogram of 8 significant bits made
    in one pass; so the search goes on until no threshold is left to try, however far
    apart mean and maximum are, and no threshold is kept for later steps. Where fewer
    than k elements reach the mean it goes on below. If no threshold lets k to 2k pass
    (ties), the 2k largest are selected exactly. Momentum, quantisation and the dense
    way of the smallest tensors are not part of it.
Default: density 0.01 is the literature's, for long trainings. The first 400 steps of a
    small GPT end 37 to 40 % behind dense with it, as an element waits for 100 steps
    (docs/measured.md).
Density: asked to twice as much (``cap``), of a gradient with as many elements that are
    not 0; exact below ``trimmed_below`` elements.
Wire: indices_K int32 ascending, values_K float32 -> 8 * K bytes, K <= max(1, round(cap
    * density * N)).
State: none. Contributed: the elements sent (rounded to float32 if they are float64).
"""

from dataclasses import dataclass
from typing import ClassVar

from gradwire.compress._coo import coo_format, share_of
from gradwire.contract import Traits
from gradwire.contract.bounds import check_whole
from gradwire.contract.payload import Format
from gradwire.contract.spec import TensorSpec

from ._magnitudes import Magnitudes
from ._threshold import Estimated, estimating

_TRIM_STEP = 0.2
_USUAL_EXCESS = 1.4  # the first threshold between k and 2k is anywhere between


@dataclass(frozen=True, kw_only=True)
class redsync(Estimated):
    """Sends ``density`` of the elements to ``cap`` times that, those of largest
    magnitude.

    Args:
        density: The kept fraction k/n, in (0, 1]; default 0.01. A larger one sends more
            bytes, and elements wait for fewer steps.
        cap: The most that is sent, as a multiple of ``density``, from 1 to 1e9; default
            2. It bounds the bytes of a step.
        trimmed_below: Gradients of fewer elements than this are cut to ``density``
            exactly: a whole number from 0; default 2**20, the paper's 4 MB. The exact
            cut sends fewer bytes and takes longer.

    >>> import torch
    >>> codec = redsync(density=0.5)
    >>> payload, _ = codec.encode(None, torch.tensor([1.0, -4.0, 2.0, 3.0]))
    >>> payload["indices"], codec.decode(payload, torch.empty(4))
    (tensor([1, 3], dtype=torch.int32), tensor([ 0., -4.,  0.,  3.]))
    """

    trimmed_below: int = 1 << 20
    traits: ClassVar[Traits] = estimating(least=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(
            "redsync trimmed_below", self.trimmed_below, "leave it out", least=0
        )

    def most(self, numel: int) -> int:
        is_trimmed = numel < self.trimmed_below
        if is_trimmed:
            return share_of(self.density, numel)
        return super().most(numel)

    def typical(self, spec: TensorSpec) -> Format:
        usual = share_of(_USUAL_EXCESS * self.density, spec.numel)
        return coo_format(min(usual, self.most(spec.numel)))

    def threshold(self, seen: Magnitudes, num_asked: int) -> float:
        if seen.numel < self.trimmed_below:
            return _trimming(seen, num_asked)
        return _halving(seen, num_asked, self.cap)


def _trimming(seen: Magnitudes, num_asked: int) -> float:
    """The first of the thresholds lowered in steps that enough elements reach."""
    mean = seen.above(0.0).mean
    ratio = 1.0 - _TRIM_STEP
    while ratio > 0:
        threshold = mean + ratio * (seen.largest - mean)
        if seen.num_reaching(threshold) >= num_asked:
            return threshold
        ratio -= _TRIM_STEP
    return 0.0


def _halving(seen: Magnitudes, num_asked: int, cap: float) -> float:
    """A threshold that k to ``cap`` k elements reach, or more if none is just right."""
    low = seen.above(0.0).mean
    high = seen.largest
    if seen.num_reaching(low) < num_asked:
        high = low
        low = 0.0
    while seen.between(low, high):
        middle = low + (high - low) / 2
        num_passing = seen.num_reaching(middle)
        if num_asked <= num_passing <= cap * num_asked:
            return middle
        if num_passing > num_asked:
            low = middle
        else:
            high = middle
    return low


EXAMPLES = (redsync(), redsync(density=0.3, trimmed_below=0))
