"""gaussiank: all above the threshold at which a normal fit has the density.

Source: Shi, Chu, Cheung, See, 2019, "Understanding top-k sparsification in distributed
    deep learning" (arXiv 1911.08772), algorithm 1: the threshold is the quantile at 1 -
    k/n of a normal with the gradient's mean and deviation; up to three times it is
    halved if fewer than 2k/3 pass, and multiplied by 1.5 if more than 4k/3 do.
Differences: the quantile is that of both tails together, 1 - k/(2n). Of the thresholds
    tried the one nearest to k is used, where the paper's is the last, whatever that
    lets pass. Zeros are no part of the fit: of a sparse gradient its other elements are
    what has to be normal. All is estimated from a histogram of 8 significant bits, in
    one pass: thresholds are within 0.4 % of the formula's. Where that one lets pass
    less than a third of k or more than ``cap`` k, as of Cauchy's distribution, the
    histogram's own edge nearest to k is used. If there is none between (ties), the
    ``cap`` k largest are selected exactly.
Default: density 0.01 is the literature's, for long trainings. The first 400 steps of a
    small GPT end 37 to 40 % behind dense with it, as an element waits for 100 steps
    (docs/measured.md).
Density: as asked within 2 % where the gradient is normal. Otherwise a third of what was
    asked to ``cap`` times it, of a gradient with as many elements that are not 0.
Wire: indices_K int32 ascending, values_K float32 -> 8 * K bytes, K <= max(1, round(cap
    * density * N)).
State: none. Contributed: the elements sent (rounded to float32 if they are float64).
"""

from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import ClassVar

from gradwire.contract import Traits

from ._magnitudes import Magnitudes
from ._threshold import Estimated, estimating, nearest

_NUM_TRIES = 4


@dataclass(frozen=True, kw_only=True)
class gaussiank(Estimated):
    """Sends about the ``density`` share of elements, by a normal fit.

    Args:
        density: The kept fraction k/n, in (0, 1]; default 0.01. A larger one sends more
            bytes, and elements wait for fewer steps.
        cap: The most that is sent, as a multiple of ``density``, from 1 to 1e9; default
            2. It bounds the bytes of a step.

    >>> import torch
    >>> grad_N = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    >>> payload, _ = gaussiank(density=0.01).encode(None, grad_N)
    >>> payload["indices"].numel()
    1023
    """

    traits: ClassVar[Traits] = estimating(least=1 / 3)

    def threshold(self, seen: Magnitudes, num_asked: int) -> float:
        share = num_asked / seen.num_elements
        mean, variance = seen.signed
        tried = [abs(mean) + NormalDist().inv_cdf(1 - share / 2) * sqrt(variance)]
        while len(tried) < _NUM_TRIES:
            num_passing = seen.num_reaching(tried[-1])
            if num_passing < 2 / 3 * num_asked:
                tried.append(0.5 * tried[-1])
            elif num_passing > 4 / 3 * num_asked:
                tried.append(1.5 * tried[-1])
            else:
                break
        return nearest(seen, tried, num_asked)


EXAMPLES = (gaussiank(), gaussiank(density=0.3))
