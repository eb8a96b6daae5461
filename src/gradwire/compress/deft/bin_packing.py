"""The rank that selects in each layer, and each rank's cost: DEFT's bin packing, algorithm 4.

Source: Yoon and Oh, ICPP 2023, section 4.3, equations 3 to 5.
Differences from the paper:
    - A layer's cost is what selection costs here and not size * log k (equation 3): our top-k reads
      a layer once, whatever k is. See ``work``. By equation 3 a rank might get few elements that
      many are chosen of, and read too little, and a layer with k = 1 would cost nothing.
    - Layers of which all is sent need no selection: they are common to all ranks, cost nothing and
      belong to nobody.

What holds of the loads. The heaviest of this greedy rule is at most the mean + (1 - 1/n) * the
largest cost (Graham, 1969), which is ``bound``. The paper says C(n) <= C_trivial(n) = n_g / n *
log(k / n) and so a speedup of more than n (equations 7 to 9), without a proof, and it is not so of
its costs either: of three equal layers one of two ranks takes two, C(2) = 2/3 n_g log(k / 3). What
is so of them: their mean over ranks is at most n_g / n * log2((sum of k, a 1 counted as 2) *
largest layer / n_g), about C_trivial(n), as log is concave and no layer is larger than n_g / n.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from torch import Tensor

PER_LAYER = 2_000
"""A layer's cost in ``work`` whatever its size: 0.8 us, where reading an element takes 0.41 ns.

Measured with ``kernels.select.topk_ranges`` on one thread of a core with AVX-512, layers of 1 to
4 M elements of which 0.001 to 0.3 are chosen, not in the cache: the sum of ``work``'s
three terms is within a factor of two of what any of them took, and within a tenth from 100,000
elements on."""
_READ_TWICE = 16_384
"""Elements of a layer that are read twice: to find the k-th one and to list those that reach it. A
longer layer is read once, but a sample of it costs as much as these."""
_PER_CHOSEN = 8
"""The cost of ranking and listing an element that may be chosen, in elements read."""


def work(sizes_L: Tensor, k_L: Tensor) -> list[int]:
    """The cost of selecting k of each layer, in elements read; 0 for layers that are sent whole."""
    read_L = sizes_L + sizes_L.clamp(max=_READ_TWICE)
    found: list[int] = (PER_LAYER + read_L + _PER_CHOSEN * k_L).where(k_L < sizes_L, 0).tolist()
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


def heaviest(costs: Sequence[float], num_bins: int) -> float:
    """Equation 5, C(n): the largest load as ``pack`` fills the bins."""
    return max(loads(costs, pack(costs, num_bins), num_bins))


def bound(costs: Sequence[float], num_bins: int) -> float:
    """The load that ``heaviest`` does not exceed."""
    return sum(costs) / num_bins + (1 - 1 / num_bins) * max(costs, default=0.0)
