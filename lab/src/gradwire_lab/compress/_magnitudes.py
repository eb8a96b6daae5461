"""A gradient's magnitudes as estimators of thresholds see them: a histogram, from
above.

Letters: B bins that hold something, by rising magnitude. Zeros and what is not finite
are in none.
"""

from __future__ import annotations

from bisect import bisect_left
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.contract import Residual
from gradwire.errors import invalid
from gradwire.kernels.libraries import (
    INT32_MAX,
    check_floating,
    check_vector,
    loader,
)

from ._reaching import SOURCES

_load_histogram = loader("histogram", SOURCES)

_NOT_FINITE = 0x7F80
_NUM_BINS = 1 << 15


class Moments(NamedTuple):
    """Mean and variance of the magnitudes above a threshold, each less the
    threshold.
    """

    mean: float
    variance: float


class Magnitudes:
    """How many elements have which magnitude, to 8 bits of significand.

    A bin stands for its middle in sums, and thresholds are taken to the nearest edge:
    either is off by 0.4 % at most. What reaches an edge is counted exactly. Of
    ``numel`` elements in all, ``num_elements`` are in a bin.
    """

    def __init__(self, bins_B: Tensor, counts_B2: Tensor) -> None:
        self.numel = int(counts_B2.sum())
        limits = bins_B.new_tensor([1, _NOT_FINITE])
        start, stop = torch.searchsorted(bins_B, limits).tolist()
        bits_B = bins_B[start:stop] << 16
        counts_B2 = counts_B2[start:stop].double()
        middles_B = bits_B + (1 << 15)
        self._levels_B = middles_B.view(torch.float32).double()
        self._counts_B2 = counts_B2
        self._edges: list[float] = bits_B.view(torch.float32).tolist()
        self._levels: list[float] = self._levels_B.tolist()
        powers_3B = torch.stack([self._levels_B**power for power in range(3)])
        of_bin_3B = counts_B2.sum(1) * powers_3B
        from_above_3B = of_bin_3B.flip(1).cumsum(1).flip(1)
        sums: list[list[float]] = from_above_3B.tolist()
        self._reaching, self._sums, self._squares = sums
        self.num_elements = 0
        if self._reaching:
            self.num_elements = int(self._reaching[0])

    @classmethod
    def of(cls, grad_N: Tensor, residual_N: Residual = None) -> Magnitudes:
        """The magnitudes of gradient plus residual; the residual holds this sum
        afterwards.
        """
        return cls(*histogram(grad_N, residual_N))

    def num_reaching(self, threshold: float) -> int:
        """How many elements are no smaller than the edge that is nearest to
        ``threshold``.

        Beyond the largest edge it is the last one: something is always sent.
        """
        return int(self._reaching[self._place(threshold)])

    def edge_within(
        self, threshold: float, num_asked: int, least: float, most: float
    ) -> float:
        """The edge that is nearest to ``threshold`` where ``least`` to ``most``
        elements reach it.

        Otherwise it is the edge at which the number within these bounds is nearest, as
        a factor, to ``num_asked``, fewer than ``num_elements``. Where one bin holds too
        many for that, as of equal elements, it is the edge of this bin: more than
        ``most`` reach it.
        """
        place = self._place(threshold)
        if not least <= self._reaching[place] <= most:
            place = self._nearest(num_asked, least, most)
        return self._edges[place]

    def _nearest(self, num_asked: int, least: float, most: float) -> int:
        """The bin whose edge ``edge_within`` falls back on."""
        # The first edge that no more than what is asked for reach: their numbers fall.
        fewer = bisect_left(self._reaching, -float(num_asked), key=lambda n: -n)
        more = fewer - 1
        if fewer == len(self._reaching) or self._reaching[fewer] < least:
            return more
        is_nearer = (
            self._reaching[more] * self._reaching[fewer] <= num_asked * num_asked
        )
        if is_nearer and self._reaching[more] <= most:
            return more
        return fewer

    def between(self, low: float, high: float) -> bool:
        """Whether some element lies between: whether both let pass another number."""
        return self._place(high) - self._place(low) > 1

    @property
    def largest(self) -> float:
        return self._levels[-1]

    @property
    def signed(self) -> Moments:
        """Mean and variance of the elements with their signs."""
        balance_B = self._counts_B2[:, 0] - self._counts_B2[:, 1]
        mean = float((balance_B * self._levels_B).sum()) / self.num_elements
        square = self._squares[0] / self.num_elements
        return Moments(mean, max(0.0, square - mean * mean))

    @property
    def mean_log(self) -> float:
        """The mean of the logarithms of all magnitudes."""
        counts: list[float] = self._counts_B2.sum(1).tolist()
        logs = (
            count * log(level)
            for count, level in zip(counts, self._levels, strict=True)
        )
        return sum(logs) / self.num_elements

    def above(self, threshold: float) -> Moments:
        """The moments of the magnitudes that reach ``threshold``, each less
        ``threshold``.
        """
        place = self._place(threshold)
        num = self._reaching[place]
        mean = self._sums[place] / num
        square = self._squares[place] / num
        return Moments(mean - threshold, max(0.0, square - mean * mean))

    def _place(self, threshold: float) -> int:
        """The first bin whose middle is no smaller, or the last."""
        return min(bisect_left(self._levels, threshold), len(self._levels) - 1)


# ---- the histogram -------------------------------------------------------------------
#
# N elements, B bins. With c = grad + residual. A float's upper half without the sign
# (exponent and 7 bits of significand) is its bin: 2^15 of them, each no wider than a
# 128th of its lower edge. From how many elements each bin holds follow count, mean,
# variance and mean logarithm of what reaches any edge, so that an estimator which fits,
# looks and fits again needs no second pass. Counts are whole numbers: no thread or
# machine changes them.


def histogram(grad_N: Tensor, residual_N: Residual = None) -> tuple[Tensor, Tensor]:
    """The bins of c that are not empty: (bins_B int32, ascending; counts_B2 int64).

    A bin's counts are of its positive and of its negative elements. Its lower edge is
    the float32 of bits bin << 16. Bin 0 holds zeros (and what is below 1e-40), bins
    from 0x7f80 on what is not finite. ``residual_N`` (the gradient's dtype) then holds
    c. Of another dtype than float32 an element is in the bin of the float32 next to it
    towards zero, so it reaches its bin's edge.
    """
    check_floating("grad_N", grad_N)
    check_vector("residual_N", residual_N, grad_N.numel(), grad_N.dtype)
    if grad_N.numel() > INT32_MAX:
        raise invalid(
            "grad_N",
            grad_N.numel(),
            f"at most {INT32_MAX} elements",
            "cut it in chunks",
        )
    library = _load_histogram(grad_N, residual_N)
    if library is None:
        return _reference_histogram(grad_N, residual_N)
    num_bins = library.gw_histogram(grad_N, residual_N, grad_N.numel())
    if num_bins < 0:
        raise MemoryError("histogram of a gradient: no memory for its tables")
    bins_B = torch.empty(num_bins, dtype=torch.int32)
    counts_B2 = torch.empty(num_bins, 2, dtype=torch.int64)
    library.gw_histogram_list(bins_B, counts_B2)
    return bins_B, counts_B2


def _reference_histogram(grad_N: Tensor, residual_N: Residual) -> tuple[Tensor, Tensor]:
    c_N = grad_N if residual_N is None else residual_N.add_(grad_N)
    near_N = c_N.to(torch.float32)
    # Not rounded away from zero: what is counted in a bin reaches its edge.
    beyond_N = near_N.to(c_N.dtype).abs() > c_N.abs()
    zeros_N = torch.zeros_like(near_N)
    inward_N = near_N.nextafter(zeros_N)
    near_N = torch.where(beyond_N, inward_N, near_N)
    bits_N = near_N.contiguous().view(torch.int32)
    bin_N = (bits_N >> 16) & (_NUM_BINS - 1)
    is_negative_N = bits_N < 0
    place_N = 2 * bin_N + is_negative_N
    counts = torch.bincount(place_N, minlength=2 * _NUM_BINS)
    counts = counts.view(_NUM_BINS, 2)
    bins_B = counts.sum(1).nonzero().flatten()
    return bins_B.to(torch.int32), counts[bins_B]
