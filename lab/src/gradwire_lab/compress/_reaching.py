"""Selection of what reaches a threshold by magnitude.

Legend: N elements, K selected elements. c = grad + residual, and elements rank, as in
``kernels.select``.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gradwire.contract import Residual
from gradwire.errors import invalid
from gradwire.kernels.libraries import check_floating, check_vector, loader
from gradwire.kernels.select import check_addressable, keys_of, list_chosen

SOURCES = Path(__file__).parent / "csrc"
_load_reach = loader("reach", SOURCES)

Room = Callable[[int], tuple[Tensor, Tensor]]
"""Gives the (indices_K int32, values_K) that K selected elements are to be listed
in.
"""


def reaching(
    grad_N: Tensor | None,
    threshold: float,
    most: int,
    room: Room,
    residual_N: Residual = None,
) -> None:
    """Lists by ascending index what of c is not 0 and no smaller than ``threshold`` by
    magnitude.

    ``threshold`` is rounded to the dtype of c; what is not finite always reaches it. Of
    more than ``most`` elements that do, the ``most`` largest are listed, as ``topk``
    ranks them. How many there are is known before they are listed: ``room(K)`` is
    called once, on this thread.

    ``residual_N`` is as in ``topk``. Without ``grad_N`` it holds c already. One pass
    over memory: 4 bytes an element, 12 with a gradient and a residual; one more where
    more than ``most`` reach.
    """
    if not threshold >= 0:
        raise invalid(
            "threshold", threshold, "0 or more", "give the least magnitude to keep"
        )
    whole_N = residual_N if grad_N is None else grad_N
    assert whole_N is not None, "neither a gradient nor a residual"
    check_floating("grad_N", whole_N)
    check_vector("residual_N", residual_N, whole_N.numel(), whole_N.dtype)
    check_addressable("grad_N", whole_N.numel())
    most = min(most, whole_N.numel())
    library = _load_reach(grad_N, residual_N)
    if library is None:
        _reference_reaching(grad_N, threshold, most, room, residual_N)
        return
    count = library.gw_reach(grad_N, residual_N, whole_N.numel(), threshold, most)
    if count >= 0:
        indices_K, values_K = room(count)
        check_vector("indices_K", indices_K, count, torch.int32)
        check_vector("values_K", values_K, count, whole_N.dtype)
    if count < 0 or library.gw_list(residual_N, indices_K, values_K):
        raise MemoryError(
            f"selection from {whole_N.numel()} elements: no memory to list it in"
        )


def _reference_reaching(
    grad_N: Tensor | None,
    threshold: float,
    most: int,
    room: Room,
    residual_N: Residual,
) -> None:
    c_N = residual_N if grad_N is None else grad_N
    assert c_N is not None
    if grad_N is not None and residual_N is not None:
        c_N = grad_N + residual_N
    bound = torch.tensor(threshold, dtype=c_N.dtype, device=c_N.device)
    passes_N = (~(c_N.abs() < bound) & (c_N != 0)) | ~c_N.isfinite()
    chosen_K = passes_N.nonzero().flatten()
    if chosen_K.numel() > most:
        order_K = keys_of(c_N[chosen_K]).sort(descending=True, stable=True).indices
        chosen_K = chosen_K[order_K[:most]].sort().values
    list_chosen(c_N, chosen_K, *room(chosen_K.numel()), residual_N)
