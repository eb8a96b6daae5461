"""Momentum correction's two passes: velocity into what is pending, and out of it.

Source: Lin et al., ICLR 2018, "Deep Gradient Compression", section 3.2 (momentum
    correction) and 3.3 (momentum factor masking).
Legend: N elements. All operands but the gradient have the working dtype, float32 or
float64.
"""

import torch
from torch import Tensor

from gradwire.kernels.libraries import check_floating, check_vector, loader

from . import SOURCES

_load_momentum = loader("momentum", SOURCES)


def accumulate(
    grad_N: Tensor,
    velocity_N: Tensor,
    pending_N: Tensor,
    whole_N: Tensor | None,
    *,
    momentum: float,
    nesterov: bool,
) -> None:
    """u = m u + g; and v grows by what v + u has beyond v + g, which an exchange is
    left to add.

    ``velocity_N`` is u and ``pending_N`` is v, which grows by m times the old u, or
    with ``nesterov`` by m times the new one. ``whole_N`` becomes v + g. Where the new u
    is not finite it is 0, as momentum must not keep an overflow for ever; v stops at
    the largest number there is, as what waits must be finite. 20 bytes an element, 24
    with ``whole_N``.
    """
    check_floating("grad_N", grad_N)
    operands = {"velocity_N": velocity_N, "pending_N": pending_N, "whole_N": whole_N}
    for name, operand in operands.items():
        if operand is not None:
            check_vector(name, operand, grad_N.numel(), grad_N.dtype)
    library = _load_momentum(grad_N, velocity_N, pending_N, whole_N)
    if library is None:
        kept_N = velocity_N * momentum
        torch.add(kept_N, grad_N, out=velocity_N)
        velocity_N.masked_fill_(~velocity_N.isfinite(), 0.0)
        most = torch.finfo(pending_N.dtype).max
        if nesterov:
            kept_N = velocity_N * momentum
        pending_N.add_(kept_N).clamp_(-most, most)
        if whole_N is not None:
            torch.add(pending_N, grad_N, out=whole_N)
        return
    library.gw_momentum_accumulate(
        grad_N, velocity_N, pending_N, whole_N, grad_N.numel(), momentum, int(nesterov)
    )


def mask(
    velocity_N: Tensor, whole_N: Tensor, pending_N: Tensor, *, least: float
) -> None:
    """u = 0 where v left, if it stayed anywhere.

    ``whole_N`` is v + g before the exchange and ``pending_N`` what is left of it. An
    element has left, in full or in part, where the two differ; it has stayed where they
    are equal and at least ``least`` (above 0) in magnitude. If none has stayed, no
    velocity is older than what is sent, and u is not written. 8 bytes an element, and 8
    for each strip of 16 elements if one has left.
    """
    check_floating("velocity_N", velocity_N)
    check_vector("whole_N", whole_N, velocity_N.numel(), velocity_N.dtype)
    check_vector("pending_N", pending_N, velocity_N.numel(), velocity_N.dtype)
    library = _load_momentum(velocity_N, whole_N, pending_N)
    if library is None:
        left_N = whole_N != pending_N
        any_stayed = (~left_N & (whole_N.abs() >= least)).any()
        velocity_N.masked_fill_(left_N & any_stayed, 0.0)
        return
    library.gw_momentum_mask(velocity_N, whole_N, pending_N, velocity_N.numel(), least)
