"""The units of a dense vector that have a bit set, laid out as a payload.

Legend: N elements, K units kept. A unit is ``width`` adjacent elements; the last may be
short and is filled up with zeros.
"""

import torch
from torch import Tensor

from ..errors import invalid
from .libraries import INT32_MAX, check_floating, check_vector, loader
from .sparse.entries import Entries, as_units, drop_unset

_load_nonzero = loader("nonzero")


def nonzero_units(
    grad_N: Tensor, buffer: Tensor, width: int = 1, residual_N: Tensor | None = None
) -> int:
    """Fills the front of ``buffer`` (uint8) with indices_K (int32) and the units'
    values; gives K.

    Values lie behind the indices, aligned to their size; the buffer has room for all
    units. With ``residual_N`` (float32 as the gradient) the sum is taken, and the
    residual is then 0: all of it is in the payload, or not finite. By bits: -0.0 is
    kept, and so is NaN. One pass over memory.
    """
    check_floating("grad_N", grad_N)
    num_units = -(-grad_N.numel() // width)
    if num_units > INT32_MAX:
        raise invalid(
            "grad_N", f"{num_units} units", f"at most {INT32_MAX}", "cut it in chunks"
        )
    room = (
        values_offset(num_units, grad_N.dtype)
        + num_units * width * grad_N.element_size()
    )
    check_vector("buffer", buffer, max(buffer.numel(), room), torch.uint8)
    check_vector("residual_N", residual_N, grad_N.numel(), grad_N.dtype)
    library = _load_nonzero(grad_N, residual_N)
    if library is None:
        return _reference(grad_N, buffer, width, residual_N)
    kept = library.gw_nonzero(grad_N, residual_N, grad_N.numel(), width, buffer)
    if kept < 0:
        raise MemoryError(
            f"non-zero units of {grad_N.numel()} elements: no memory for counts"
        )
    return int(kept)


def values_offset(num_kept: int, dtype: torch.dtype) -> int:
    """The first byte of the values behind so many indices."""
    return -(-4 * num_kept // dtype.itemsize) * dtype.itemsize


def _reference(
    grad_N: Tensor, buffer: Tensor, width: int, residual_N: Tensor | None
) -> int:
    c_N = grad_N if residual_N is None else grad_N + residual_N
    units_Kw = as_units(c_N, width)
    every = torch.arange(len(units_Kw), dtype=torch.int32, device=c_N.device)
    kept_K, values, _ = drop_unset(Entries(every, units_Kw.view(-1), width))
    start = values_offset(len(kept_K), grad_N.dtype)
    buffer[: 4 * len(kept_K)].view(torch.int32).copy_(kept_K)
    buffer[4 * len(kept_K) : start] = 0
    buffer[start : start + values.nbytes].view(values.dtype).copy_(values)
    if residual_N is not None:
        residual_N.zero_()
    return len(kept_K)
