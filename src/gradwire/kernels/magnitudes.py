"""Statistics of a gradient's magnitudes, in one pass, before elements are selected.

Legend: N elements, B bins, L ranges. With c = grad + residual.

A float's upper half without the sign (exponent and 7 bits of significand) is its bin: 2^15 of them,
each no wider than a 128th of its lower edge. From how many elements each bin holds follow count,
mean, variance and mean logarithm of what reaches any edge, so that an estimator which fits, looks
and fits again needs no second pass. Counts are whole numbers: no thread or machine changes them.
"""

from __future__ import annotations

import torch

from ..errors import invalid
from .build import INT32_MAX, check_floating, check_vector, load_library, serves_cpp

NUM_BINS = 1 << 15
_NORM_BLOCK, _LANES = 8192, 16


def histogram(
    grad_N: torch.Tensor, residual_N: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bins of c that are not empty: (bins_B int32, ascending; counts_B2 int64).

    A bin's counts are of its positive and of its negative elements. Its lower edge is the float32
    of bits bin << 16. Bin 0 holds zeros (and what is below 1e-40), bins from 0x7f80 on what is not
    finite. ``residual_N`` (the gradient's dtype) then holds c. Of another dtype than float32 an
    element is in the bin of the float32 next to it towards zero, so it reaches its bin's edge.
    """
    check_floating("grad_N", grad_N)
    check_vector("residual_N", residual_N, grad_N.numel(), grad_N.dtype)
    if grad_N.numel() > INT32_MAX:
        raise invalid("grad_N", grad_N.numel(), f"at most {INT32_MAX} elements", "cut it in chunks")
    library = load_library("magnitudes") if serves_cpp(grad_N, residual_N) else None
    if library is None:
        return _reference_histogram(grad_N, residual_N)
    num_bins = library.gw_histogram(grad_N, residual_N, grad_N.numel())
    if num_bins < 0:
        raise MemoryError("histogram of a gradient: no memory for its tables")
    bins_B = torch.empty(num_bins, dtype=torch.int32)
    counts_B2 = torch.empty(num_bins, 2, dtype=torch.int64)
    library.gw_histogram_list(bins_B, counts_B2)
    return bins_B, counts_B2


def range_norms(
    grad_N: torch.Tensor,
    starts_L: torch.Tensor,
    stops_L: torch.Tensor,
    norms_L: torch.Tensor,
    residual_N: torch.Tensor | None = None,
) -> None:
    """Fills ``norms_L`` (float64) with the sum of squares of c over each of L ranges.

    ``starts_L`` and ``stops_L`` are int64 on the CPU; ranges must not overlap. ``residual_N`` (the
    gradient's dtype) then holds c, in the ranges and nowhere else. Sums are taken in float64, in
    an order that depends on the range's length alone.
    """
    num_ranges = starts_L.numel()
    check_floating("grad_N", grad_N)
    check_vector("residual_N", residual_N, grad_N.numel(), grad_N.dtype)
    for name, table_L in (("starts_L", starts_L), ("stops_L", stops_L)):
        check_vector(name, table_L, num_ranges, torch.int64)
    check_vector("norms_L", norms_L, num_ranges, torch.float64)
    if not bool(((starts_L >= 0) & (starts_L <= stops_L) & (stops_L <= grad_N.numel())).all()):
        ranges = list(zip(starts_L.tolist(), stops_L.tolist(), strict=True))
        accepted = f"within [0, {grad_N.numel()}]"
        raise invalid("ranges (start, stop)", ranges, accepted, "take the layers' own bounds")
    library = load_library("magnitudes") if serves_cpp(grad_N, residual_N) else None
    if library is None:
        for i, (start, stop) in enumerate(zip(starts_L.tolist(), stops_L.tolist(), strict=True)):
            c_M = grad_N[start:stop]
            if residual_N is not None:
                c_M = residual_N[start:stop].add_(c_M)
            norms_L[i] = _reference_sum_squares(c_M)
        return
    tables = (starts_L, stops_L, num_ranges, norms_L)
    operands = (grad_N, residual_N)
    if library.gw_range_norms(*operands, *tables):
        raise MemoryError(f"norms of {num_ranges} ranges: no memory for their parts")


def _reference_histogram(
    grad_N: torch.Tensor, residual_N: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    c_N = grad_N if residual_N is None else residual_N.add_(grad_N)
    near_N = c_N.to(torch.float32)
    # Not rounded away from zero: what is counted in a bin reaches its edge.
    beyond_N = near_N.to(c_N.dtype).abs() > c_N.abs()
    near_N = torch.where(beyond_N, near_N.nextafter(torch.zeros_like(near_N)), near_N)
    bits_N = near_N.contiguous().view(torch.int32)
    place_N = 2 * ((bits_N >> 16) & (NUM_BINS - 1)) + (bits_N < 0)
    counts = torch.bincount(place_N, minlength=2 * NUM_BINS).view(NUM_BINS, 2)
    bins_B = counts.sum(1).nonzero().flatten()
    return bins_B.to(torch.int32), counts[bins_B]


def _reference_sum_squares(c_M: torch.Tensor) -> torch.Tensor:
    """Blocks of rows of lanes; ``cumsum`` adds in turn, where ``sum`` may pair as it likes."""
    padding = -c_M.numel() % _NORM_BLOCK
    squares = torch.nn.functional.pad(c_M.double(), (0, padding)).square_()
    lanes = squares.view(-1, _NORM_BLOCK // _LANES, _LANES).cumsum(1)[:, -1]
    return torch.nn.functional.pad(lanes.cumsum(1)[:, -1], (1, 0)).cumsum(0)[-1]
