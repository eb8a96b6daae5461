"""sidco: all above a threshold at k of a distribution fitted to the tail.

Source: Abdelmoniem, Elzanaty, Alouini, Canini, MLSys 2021, "An efficient
    statistical-based gradient compression technique for distributed training systems"
    (SIDCo), algorithm 1: fits by moments of the exponential (SIDCo-E), the gamma and
    then generalised Pareto (SIDCo-GP), or the generalised Pareto distribution
    (SIDCo-P); a stage keeps a quarter (delta_1), the last one the rest.
Differences: the number of stages is neither a setting nor adapted over steps: every
    number there can be is tried, and the one that lets pass what is nearest to k is
    used. A stage aims at k of the elements that really passed the one before, where the
    paper trusts its quarter. Zeros are no part of a fit: of a sparse gradient it is
    that of its other elements. All is estimated from a histogram of 8 significant bits,
    in one pass: thresholds are within 0.4 % of the formulas'. Where the best fit lets
    pass less than 0.6 k or more than ``cap`` k, as of gradients of a few large rows
    among many small ones, the histogram's own edge nearest to k is used. If there is
    none between (ties), the ``cap`` k largest are selected exactly.
Default: density 0.01 is the literature's, for long trainings. The first 400 steps of a
    small GPT end 37 to 40 % behind dense with it, as an element waits for 100 steps
    (docs/measured.md).
Density: 0.6 of what was asked to ``cap`` times it, of a gradient with as many elements
that are not
    0. Of normal, Laplace and heavy-tailed ones a fit decides.
Wire: indices_K int32 ascending, values_K float32 -> 8 * K bytes, K <= max(1, round(cap
    * density * N)).
State: none. Contributed: the elements sent (rounded to float32 if they are float64).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import expm1, lgamma, log, sqrt
from typing import ClassVar

from gradwire.contract import Traits
from gradwire.contract.bounds import check_choice

from ._magnitudes import Magnitudes, Moments
from ._threshold import Estimated, estimating, nearest

_DISTRIBUTIONS = ("exponential", "gamma", "pareto")
_STAGE_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class sidco(Estimated):
    """Sends about the ``density`` share of elements, by fits of a sparsity-inducing
    distribution.

    Args:
        density: The kept fraction k/n, in (0, 1]; default 0.01. A larger one sends more
            bytes, and elements wait for fewer steps.
        cap: The most that is sent, as a multiple of ``density``, from 1 to 1e9; default
            2. It bounds the bytes of a step.
        distribution: The distribution that is fitted: "exponential" (the default),
            "gamma" (with Pareto tails) or "pareto". The one nearest to the gradient's
            own meets the density best.

    >>> import torch
    >>> grad_N = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    >>> payload, _ = sidco(density=0.01).encode(None, grad_N)
    >>> payload["indices"].numel()
    976
    """

    distribution: str = "exponential"
    traits: ClassVar[Traits] = estimating(least=0.6)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("sidco distribution", self.distribution, _DISTRIBUTIONS)

    def threshold(self, seen: Magnitudes, num_asked: int) -> float:
        return nearest(seen, self._ends(seen, num_asked), num_asked)

    def _ends(self, seen: Magnitudes, num_asked: int) -> Iterator[float]:
        """Thresholds at which one stage would end, two stages, and so on while more
        than k pass.
        """
        reached = 0.0
        num_passing = seen.num_elements
        while True:
            share = num_asked / num_passing
            yield reached + self._excess(seen, reached, share)
            if share >= _STAGE_SHARE:
                return
            reached += self._excess(seen, reached, _STAGE_SHARE)
            before = num_passing
            num_passing = seen.num_reaching(reached)
            if not num_asked < num_passing < before:
                return

    def _excess(self, seen: Magnitudes, reached: float, share: float) -> float:
        """The fitted distance above ``reached`` that ``share`` of the magnitudes there
        exceed.
        """
        if self.distribution == "exponential":
            return seen.above(reached).mean * log(1 / share)
        if self.distribution == "gamma" and reached == 0.0:
            return _gamma(seen, share)
        return _pareto(seen.above(reached), share)


def _gamma(seen: Magnitudes, share: float) -> float:
    """The paper's closed form, by Minka's estimate of the shape; exact where that is
    1.
    """
    mean = seen.above(0.0).mean
    spread = log(mean) - seen.mean_log
    if spread <= 0:
        return mean
    shape = (3 - spread + sqrt((spread - 3) ** 2 + 24 * spread)) / (12 * spread)
    return max(0.0, -mean / shape * (log(share) + lgamma(shape)))


def _pareto(above: Moments, share: float) -> float:
    """The generalised Pareto's quantile, by its first two moments."""
    if above.variance <= 0:
        return above.mean
    ratio = above.mean**2 / above.variance
    shape = 0.5 * (1 - ratio)
    scale = 0.5 * above.mean * (1 + ratio)
    if abs(shape) < 1e-9:
        return -scale * log(share)
    return scale / shape * expm1(-shape * log(share))


EXAMPLES = (sidco(), sidco(density=0.3, distribution="gamma"))
