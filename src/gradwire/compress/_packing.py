"""Which rank selects in which layer: DEFT's bin packing, algorithm 4, and what it costs whom.

Source: Yoon and Oh, ICPP 2023, section 4.3, equations 3 to 5.
Differences from the paper: equation 3 gives a layer with k = 1 the cost 0, though it is read as any
    other; here a cost is size * max(1, log2 k). Layers of which all is sent need no selection: they
    are common to all ranks, cost nothing and belong to nobody.

What holds of the costs. The paper says C(n) <= C_trivial(n) = n_g / n * log(k / n) and so a speedup
of more than n (equations 7 to 9), without a proof, and it is not so: of three equal layers one of
two ranks takes two, C(2) = 2/3 n_g log(k / 3). What is so: the mean load of ranks is at most
n_g / n * log2((sum of k, a 1 counted as 2) * largest layer / n_g), about C_trivial(n), as log is
concave and no layer is larger than n_g / n. And the heaviest load of this greedy rule is at most
the mean load + (1 - 1/n) * the largest cost (Graham, 1969). ``bound`` is their sum.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import log2

from torch import Tensor


def costs(sizes_L: Tensor, k_L: Tensor) -> list[float]:
    """size * max(1, log2 k) of each layer; 0 of those that are sent whole."""
    found_L = sizes_L * k_L.clamp(min=2).double().log2()
    found: list[float] = found_L.where(k_L < sizes_L, 0.0).tolist()
    return found


def pack(costs: Sequence[float], num_bins: int) -> list[int]:
    """The bin of each item: in descending order of cost, each into the lightest bin of its time.

    Of equals the first comes first.

    >>> pack([1.0, 5.0, 3.0, 3.0], num_bins=2)
    [0, 0, 1, 1]
    """
    bins = [(0.0, number) for number in range(num_bins)]
    found = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, lightest = bins[0]
        found[item] = lightest
        heapq.heapreplace(bins, (load + costs[item], lightest))
    return found


def loads(costs: Sequence[float], bins: Sequence[int], num_bins: int) -> list[float]:
    """Equation 4: the sum of costs in each bin; the largest is C(n)."""
    found = [0.0] * num_bins
    for cost, number in zip(costs, bins, strict=True):
        found[number] += cost
    return found


def bound(sizes_L: Tensor, k_L: Tensor, num_bins: int) -> float:
    """What no load exceeds, whatever the gradient."""
    numel = int(sizes_L.sum())
    inner = float((sizes_L * k_L.clamp(min=2)).sum())
    mean = numel / num_bins * log2(inner / numel) if numel else 0.0
    return mean + (1 - 1 / num_bins) * max(costs(sizes_L, k_L), default=0.0)
