"""Taking the values at listed elements out of a dense vector.

Legend: N elements, K listed elements.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..errors import InvalidSetting
from ._build import load_library
from ._operands import address, check_floating, check_vector, serves_cpp


def take(
    source_N: Tensor,
    indices_K: Tensor,
    values_K: Tensor,
    *,
    scale: float = 1.0,
    residual_N: Tensor | None = None,
) -> None:
    """values = scale * source[indices]; then residual[indices] = 0.

    ``indices_K`` are int32 without duplicates; ``values_K`` and ``residual_N``, which may be
    ``source_N`` itself, are of its dtype. Raises InvalidSetting, with nothing written, where an
    index lies outside ``source_N``.
    """
    numel, count = source_N.numel(), indices_K.numel()
    check_floating("source_N", source_N)
    check_vector("indices_K", indices_K, count, torch.int32)
    check_vector("values_K", values_K, count, source_N.dtype)
    if residual_N is not None:
        check_vector("residual_N", residual_N, numel, source_N.dtype)
    library = load_library("gather") if serves_cpp(source_N, residual_N) else None
    if library is None:
        bad = _reference_take(source_N, indices_K, values_K, scale, residual_N)
    else:
        library.gw_take.restype = ctypes.c_int64
        bad = library.gw_take(
            address(source_N),
            address(indices_K),
            ctypes.c_int64(count),
            ctypes.c_int64(numel),
            ctypes.c_float(scale),
            address(values_K),
            address(residual_N),
            torch.get_num_threads(),
        )
    if bad >= 0:
        raise InvalidSetting(
            f"indices_K[{bad}] must lie in [0, {numel}), got {int(indices_K[bad])}; the list was "
            "made for a vector of another length"
        )


def _reference_take(
    source_N: Tensor,
    indices_K: Tensor,
    values_K: Tensor,
    scale: float,
    residual_N: Tensor | None,
) -> int:
    outside = ((indices_K < 0) | (indices_K >= source_N.numel())).nonzero()
    if outside.numel():
        return int(outside[0])
    index_K = indices_K.long()
    torch.mul(source_N[index_K], scale, out=values_K)
    if residual_N is not None:
        residual_N[index_K] = 0.0
    return -1
