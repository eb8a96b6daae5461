"""How many elements each layer is to send, by its share of the norms: DEFT, algorithm 3.

Source: Yoon and Oh, ICPP 2023, section 4.2.
Differences from the paper: its loop, in descending order of norm, hands each layer its share of
    what is left, at least 1 and at most the layer, and so
    - overspends by what layers below 1 get, with nothing left: up to L - 1 elements;
    - loses what a small layer cannot take, where all layers behind it are small too.
    Here all shares are found at once: k_i = min(size_i, max(1, level * norm_i)) with the one level
    at which they add up to the budget. Where no bound applies that is what the loop gives.
    The k are whole numbers: each share is rounded up or down such that all running sums are
    rounded to the nearest, so every k_i is within 1 of its share, and their sum is exact.
    A norm that is not finite counts as the largest that is.

So sum(k) = max(budget, L), or less only where every layer with a norm above 0 is sent whole. The
density therefore has the floor L / n_g, and a gradient of zeros sends one element a layer.
"""

from __future__ import annotations

from bisect import bisect_right

import torch
from torch import Tensor

_LEAST = 1e-200
"""The least share of the largest norm; less counts as 0, as its level would not be finite."""


def layer_k(norms_L: Tensor, sizes_L: Tensor, budget: int) -> Tensor:
    """k of each layer (int64, 1 to its size) from norms (float64) and sizes (int64, at least 1).

    >>> sizes_L = torch.tensor([100, 100, 2, 50])
    >>> layer_k(torch.tensor([6.0, 2.0, 8.0, 0.0]).double(), sizes_L, budget=23).tolist()
    [15, 5, 2, 1]
    """
    if not sizes_L.numel():
        return torch.zeros_like(sizes_L)
    return rounded(shares(_tamed(norms_L), sizes_L, max(budget, sizes_L.numel())))


def shares(norms_L: Tensor, sizes_L: Tensor, budget: int) -> Tensor:
    """min(size, max(1, level * norm)), float64, at the level at which they add up to ``budget``.

    Norms are finite, and ``budget`` is at least L. What cannot be spent is not.
    """
    floating_L = sizes_L.double()

    def at(level: float) -> Tensor:
        return (norms_L * level).clamp(min=1.0).minimum(floating_L)

    def spent(level: float) -> float:
        return float(at(level).sum())

    # Between two neighbouring levels at which some share stops at a bound, all is linear.
    is_positive_L = norms_L > _LEAST
    norms_P = norms_L[is_positive_L]
    bends = torch.cat([1 / norms_P, floating_L[is_positive_L] / norms_P]).sort().values.tolist()
    above = bisect_right(bends, float(budget), key=spent)
    if above == len(bends):
        return at(bends[-1] if bends else 0.0)
    low, high = bends[max(above - 1, 0)], bends[above]
    least, most = spent(low), spent(high)
    return at(low + (high - low) * (budget - least) / (most - least))


def rounded(shares_L: Tensor) -> Tensor:
    """Whole numbers (int64) next to ``shares_L``, whose running sums are theirs, rounded."""
    whole_L = shares_L.floor()
    # Only fractions are summed: a share that is whole keeps its value whatever the rounding.
    sums_L = (shares_L - whole_L).cumsum(0).round()
    return (whole_L + sums_L.diff(prepend=sums_L.new_zeros(1))).long()


def _tamed(norms_L: Tensor) -> Tensor:
    """Norms as shares of the largest that is finite; others count as that."""
    is_finite_L = norms_L.isfinite()
    largest = float(norms_L.where(is_finite_L, 0.0).max())
    if not largest:
        return (~is_finite_L).double()
    return (norms_L / largest).where(is_finite_L, 1.0)
