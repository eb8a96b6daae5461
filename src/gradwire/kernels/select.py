"""Exact top-k by magnitude, and adding sparse entries to a dense vector.

Source: the selection step of Lin et al. 2018, "Deep Gradient Compression", done exactly.
Legend: N elements, K selected elements.

With c = grad + residual, elements rank by the bit pattern of |c| (so NaN > inf > finite), ties by
the lower index; the K first are selected and listed by ascending index. Not in the C++'s scope:
a list of more than 2^31 - 1 elements, which int32 indices cannot address.
"""

from __future__ import annotations

import ctypes

import torch

from ..errors import InvalidSetting, invalid
from ._build import load_library
from ._operands import INT32_MAX, address, check_floating, check_vector, serves_cpp

_BIT_PATTERNS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def topk(
    grad_N: torch.Tensor,
    indices_K: torch.Tensor,
    values_K: torch.Tensor,
    residual_N: torch.Tensor | None = None,
) -> None:
    """Fills ``indices_K`` (int32, ascending) and ``values_K`` with the K largest of c by magnitude.

    K is the length of ``indices_K``, at most N. ``values_K`` and ``residual_N`` have the
    gradient's dtype. ``residual_N`` then holds c, but 0 where an element was selected or is not
    finite. One pass over memory and about 1.3 K more reads: 4 bytes an element, 12 with a residual.
    """
    num_elements, num_selected = grad_N.numel(), indices_K.numel()
    check_floating("grad_N", grad_N)
    check_vector("indices_K", indices_K, num_selected, torch.int32)
    check_vector("values_K", values_K, num_selected, grad_N.dtype)
    if residual_N is not None:
        check_vector("residual_N", residual_N, num_elements, grad_N.dtype)
    if num_selected > num_elements:
        raise invalid(
            "indices_K", num_selected, f"at most grad_N's length {num_elements}", "shorten it"
        )
    if num_elements > INT32_MAX:
        raise invalid("grad_N", num_elements, f"at most {INT32_MAX} elements", "cut it in chunks")
    library = load_library("select") if serves_cpp(grad_N, residual_N) else None
    if library is None:
        _reference_topk(grad_N, indices_K, values_K, residual_N)
        return
    failed = library.gw_topk(
        address(grad_N),
        address(residual_N),
        ctypes.c_int64(num_elements),
        ctypes.c_int64(num_selected),
        address(indices_K),
        address(values_K),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"top-k of {num_elements} elements: no memory for its candidates")


def scatter_add(
    indices_K: torch.Tensor, values_K: torch.Tensor, out_N: torch.Tensor, scale: float = 1.0
) -> None:
    """out[indices] += scale * values, in the order of the list; an index may occur more than once.

    Raises InvalidSetting, with ``out_N`` untouched, where an index lies outside ``out_N``.
    """
    num_entries = indices_K.numel()
    check_floating("out_N", out_N)
    check_vector("indices_K", indices_K, num_entries, torch.int32)
    check_vector("values_K", values_K, num_entries, out_N.dtype)
    library = load_library("select") if serves_cpp(out_N) else None
    if library is None:
        outside = ((indices_K < 0) | (indices_K >= out_N.numel())).nonzero()
        bad = int(outside[0]) if outside.numel() else -1
        if bad < 0:
            out_N.index_add_(0, indices_K, values_K * scale)
    else:
        library.gw_scatter_add.restype = ctypes.c_int64
        bad = library.gw_scatter_add(
            address(indices_K),
            address(values_K),
            ctypes.c_int64(num_entries),
            address(out_N),
            ctypes.c_int64(out_N.numel()),
            ctypes.c_float(scale),
            torch.get_num_threads(),
        )
    if bad >= 0:
        raise InvalidSetting(
            f"indices_K[{bad}] must lie in [0, {out_N.numel()}), got {int(indices_K[bad])}; "
            "the entries were made for a vector of another length"
        )


def _reference_topk(
    grad_N: torch.Tensor,
    indices_K: torch.Tensor,
    values_K: torch.Tensor,
    residual_N: torch.Tensor | None,
) -> None:
    c_N = grad_N if residual_N is None else grad_N + residual_N
    pattern = _BIT_PATTERNS[c_N.element_size()]
    key_N = c_N.view(pattern) & torch.iinfo(pattern).max
    order_N = key_N.sort(descending=True, stable=True).indices
    chosen_K = order_N[: indices_K.numel()].sort().values
    indices_K.copy_(chosen_K)
    values_K.copy_(c_N[chosen_K])
    if residual_N is not None:
        residual_N.copy_(torch.where(c_N.isfinite(), c_N, 0.0))
        residual_N[chosen_K] = 0.0
