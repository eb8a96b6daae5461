"""Selection by magnitude in each of several ranges of a vector, in one call.

Legend: N elements, K selected elements, L ranges.
"""

import torch
from torch import Tensor

from gradwire.errors import invalid
from gradwire.kernels.libraries import check_floating, check_vector, loader
from gradwire.kernels.select import check_addressable, topk

_load_select = loader("select")


def topk_ranges(
    c_N: Tensor,
    starts_L: Tensor,
    stops_L: Tensor,
    ks_L: Tensor,
    indices_K: Tensor,
    values_K: Tensor,
    firsts_L: Tensor | None = None,
) -> None:
    """Top-k of each of L successive ranges of ``c_N``: DEFT's layer-wise selection.

    ``starts_L``, ``stops_L`` and ``ks_L`` are int64 on the CPU, K the sum of ``ks_L``.
    ``indices_K`` (int32) are places in ``c_N``; they ascend where the ranges do and do
    not overlap. With ``firsts_L`` (int64) that is what a range's first element is
    called instead of its start. Short ranges are shared out among threads, so a
    thousand small layers cost one call.
    """
    num_elements = c_N.numel()
    num_ranges = starts_L.numel()
    num_selected = indices_K.numel()
    check_floating("c_N", c_N)
    check_addressable("c_N", num_elements)
    if firsts_L is None:
        firsts_L = starts_L
    tables = {
        "starts_L": starts_L,
        "stops_L": stops_L,
        "ks_L": ks_L,
        "firsts_L": firsts_L,
    }
    for name, table_L in tables.items():
        check_vector(name, table_L, num_ranges, torch.int64)
    check_vector("indices_K", indices_K, num_selected, torch.int32)
    check_vector("values_K", values_K, num_selected, c_N.dtype)
    library = _load_select(c_N)
    status = None
    if library is not None:
        status = library.gw_topk_ranges(
            c_N,
            num_elements,
            *tables.values(),
            num_ranges,
            indices_K,
            values_K,
            num_selected,
        )
    if status == 1:
        raise MemoryError(
            f"top-k of {num_ranges} ranges: no memory for their candidates"
        )
    if status == 0:
        return
    ranges = [*zip(starts_L.tolist(), stops_L.tolist(), ks_L.tolist(), strict=True)]
    if any(a < 0 or b > num_elements or k < 0 or k > b - a for a, b, k in ranges):
        accepted = f"within [0, {num_elements}], each no shorter than its k"
        raise invalid(
            "ranges (start, stop, k)", ranges, accepted, "take the layers' own bounds"
        )
    if int(ks_L.sum()) != num_selected:
        accepted = f"of {int(ks_L.sum())} elements, the sum of ks_L"
        raise invalid("indices_K", num_selected, accepted, "slice it to that length")
    done = 0
    for (start, stop, k), first in zip(ranges, firsts_L.tolist(), strict=True):
        into = slice(done, done + k)
        topk(c_N[start:stop], indices_K[into], values_K[into])
        indices_K[into] += first
        done += k
