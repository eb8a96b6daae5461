"""Selection by magnitude, and adding sparse entries to a dense vector.

Source: the selection step of Lin et al. 2018, "Deep Gradient Compression", done
exactly.
Legend: N elements, K selected elements.

With c = grad + residual, elements rank by the bit pattern of |c| (so NaN > inf >
finite), ties by the lower index; the K first are selected and listed by ascending
index. Not in the C++'s scope: a list of more than 2^31 - 1 elements, which int32
indices cannot address.
"""

from array import array
from collections.abc import Sequence

import torch

from ..errors import InvalidSetting, invalid
from .libraries import (
    BITS,
    INT32_MAX,
    check_floating,
    check_vector,
    first_outside,
    loader,
)

_load_scatter = loader("scatter")
_load_select = loader("select")


def topk(
    grad_N: torch.Tensor,
    indices_K: torch.Tensor,
    values_K: torch.Tensor,
    residual_N: torch.Tensor | None = None,
) -> None:
    """Fills ``indices_K`` (int32, ascending) and ``values_K``.

    They hold the K largest of c by magnitude.

    K is the length of ``indices_K``, at most N. ``values_K`` and ``residual_N`` have
    the gradient's dtype. ``residual_N`` then holds c, but 0 where an element was
    selected or is not finite. One pass over memory and about 1.3 K more reads: 4 bytes
    an element, 12 with a residual.
    """
    topk_many((grad_N,), (indices_K,), (values_K,), (residual_N,))


def topk_many(
    grads: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor | None],
) -> None:
    """``topk`` of several vectors in one call: short ones cost little more."""
    operands = list(zip(grads, residuals, indices, values, strict=True))
    for grad_N, residual_N, indices_K, values_K in operands:
        num_elements = grad_N.numel()
        num_selected = indices_K.numel()
        check_floating("grad_N", grad_N)
        check_vector("indices_K", indices_K, num_selected, torch.int32)
        check_vector("values_K", values_K, num_selected, grad_N.dtype)
        check_vector("residual_N", residual_N, num_elements, grad_N.dtype)
        if num_selected > num_elements:
            raise invalid(
                "indices_K",
                num_selected,
                f"at most grad_N's length {num_elements}",
                "shorten it",
            )
        check_addressable("grad_N", num_elements)
    library = _load_select(*grads, *residuals)
    if library is None:
        for grad_N, residual_N, indices_K, values_K in operands:
            _reference_topk(grad_N, indices_K, values_K, residual_N)
        return
    words = array("Q")
    for grad_N, residual_N, indices_K, values_K in operands:
        kept = 0 if residual_N is None else residual_N.data_ptr()
        words.extend((grad_N.data_ptr(), kept, grad_N.numel(), indices_K.numel()))
        words.extend((indices_K.data_ptr(), values_K.data_ptr(), 0))
    tasks = words.buffer_info()[0]
    if library.gw_topk_many(tasks, len(operands)):
        num_elements = sum(grad_N.numel() for grad_N in grads)
        raise MemoryError(
            f"top-k of {num_elements} elements: no memory for its candidates"
        )


def scatter_add(
    indices_K: torch.Tensor,
    values: torch.Tensor,
    out_N: torch.Tensor,
    scale: float = 1.0,
    width: int = 1,
) -> None:
    """out[indices] += scale * values, in the order of the list.

    An index may occur more than once.

    Indices count units of ``width`` elements, and there are as many values for each;
    what of the last unit lies beyond ``out_N`` is dropped. Raises InvalidSetting, with
    ``out_N`` untouched, where an index lies outside ``out_N``.
    """
    num_entries = indices_K.numel()
    num_units = -(-out_N.numel() // width)
    check_floating("out_N", out_N)
    check_vector("indices_K", indices_K, num_entries, torch.int32)
    check_vector("values", values, num_entries * width, out_N.dtype)
    library = _load_scatter(out_N)
    if library is None:
        bad = first_outside(indices_K, num_units)
        if bad < 0:
            # asked for where no C++ compiler is
            from .sparse.entries import as_units

            units_Uw = as_units(out_N, width)
            units_Uw.index_add_(0, indices_K, (values * scale).view(-1, width))
            out_N.copy_(units_Uw.view(-1)[: out_N.numel()])
    else:
        bad = library.gw_scatter_add(
            indices_K, values, num_entries, out_N, out_N.numel(), width, scale
        )
    if bad >= 0:
        raise InvalidSetting(
            f"indices_K[{bad}] must lie in [0, {num_units}), got "
            f"{int(indices_K[bad])}; "
            "the entries were made for a vector of another length"
        )


def check_addressable(name: str, num_elements: int) -> None:
    """Refuses a vector whose places an int32 cannot tell."""
    if num_elements > INT32_MAX:
        raise invalid(
            name, num_elements, f"at most {INT32_MAX} elements", "cut it in chunks"
        )


def _reference_topk(
    grad_N: torch.Tensor,
    indices_K: torch.Tensor,
    values_K: torch.Tensor,
    residual_N: torch.Tensor | None,
) -> None:
    c_N = grad_N if residual_N is None else grad_N + residual_N
    order_N = keys_of(c_N).sort(descending=True, stable=True).indices
    list_chosen(
        c_N, order_N[: indices_K.numel()].sort().values, indices_K, values_K, residual_N
    )


def keys_of(c_N: torch.Tensor) -> torch.Tensor:
    """The keys by which elements are ranked: their bits without the sign."""
    pattern = BITS[c_N.element_size()]
    return c_N.view(pattern) & torch.iinfo(pattern).max


def list_chosen(
    c_N: torch.Tensor,
    chosen_K: torch.Tensor,
    indices_K: torch.Tensor,
    values_K: torch.Tensor,
    residual_N: torch.Tensor | None,
) -> None:
    """Lists these elements of c; the residual loses them, and what is not finite."""
    indices_K.copy_(chosen_K)
    values_K.copy_(c_N[chosen_K])
    if residual_N is not None:
        residual_N.copy_(torch.where(c_N.isfinite(), c_N, 0.0))
        residual_N[chosen_K] = 0.0
