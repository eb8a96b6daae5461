"""Norms of ranges of a gradient, in one pass, before elements are selected.

Legend: N elements, L ranges. With c = grad + residual.
"""

import torch

from gradwire.errors import invalid
from gradwire.kernels.libraries import check_floating, check_vector, loader

from . import SOURCES

_load_magnitudes = loader("magnitudes", SOURCES)

_NORM_BLOCK = 8192
_LANES = 16


def range_norms(
    grad_N: torch.Tensor,
    starts_L: torch.Tensor,
    stops_L: torch.Tensor,
    norms_L: torch.Tensor,
    residual_N: torch.Tensor | None = None,
) -> None:
    """Fills ``norms_L`` (float64) with the sum of squares of c over each of L ranges.

    ``starts_L`` and ``stops_L`` are int64 on the CPU; ranges must not overlap.
    ``residual_N`` (the gradient's dtype) then holds c, in the ranges and nowhere else.
    Sums are taken in float64, in an order that depends on the range's length alone.
    """
    num_ranges = starts_L.numel()
    check_floating("grad_N", grad_N)
    check_vector("residual_N", residual_N, grad_N.numel(), grad_N.dtype)
    for name, table_L in (("starts_L", starts_L), ("stops_L", stops_L)):
        check_vector(name, table_L, num_ranges, torch.int64)
    check_vector("norms_L", norms_L, num_ranges, torch.float64)
    if not bool(
        ((starts_L >= 0) & (starts_L <= stops_L) & (stops_L <= grad_N.numel())).all()
    ):
        ranges = list(zip(starts_L.tolist(), stops_L.tolist(), strict=True))
        raise invalid(
            "ranges (start, stop)",
            ranges,
            f"within [0, {grad_N.numel()}]",
            "take the layers' own bounds",
        )
    library = _load_magnitudes(grad_N, residual_N)
    if library is None:
        for i, (start, stop) in enumerate(
            zip(starts_L.tolist(), stops_L.tolist(), strict=True)
        ):
            c_M = grad_N[start:stop]
            if residual_N is not None:
                c_M = residual_N[start:stop].add_(c_M)
            norms_L[i] = _reference_sum_squares(c_M)
        return
    tables = (starts_L, stops_L, num_ranges, norms_L)
    operands = (grad_N, residual_N)
    if library.gw_range_norms(*operands, *tables):
        raise MemoryError(f"norms of {num_ranges} ranges: no memory for their parts")


def _reference_sum_squares(c_M: torch.Tensor) -> torch.Tensor:
    """Blocks of rows of lanes.

    ``cumsum`` adds in turn, where ``sum`` may pair as it likes.
    """
    padding = -c_M.numel() % _NORM_BLOCK
    squares = torch.nn.functional.pad(c_M.double(), (0, padding)).square_()
    lanes = squares.view(-1, _NORM_BLOCK // _LANES, _LANES).cumsum(1)[:, -1]
    blocks = lanes.cumsum(1)[:, -1]
    return torch.nn.functional.pad(blocks, (1, 0)).cumsum(0)[-1]
