"""The edges of every encode: specs read off tensors, residuals kept finite."""

from __future__ import annotations

from torch import Tensor

from ..contract.spec import clear_not_finite, working_dtype


def as_working(grad_N: Tensor) -> Tensor:
    """The gradient, contiguous and in its working dtype.

    Itself where it is that already.
    """
    return grad_N.to(working_dtype(grad_N.dtype)).contiguous()


def subtract_sent(residual_N: Tensor, decoded_N: Tensor) -> None:
    """Takes what was sent off the residual; what is not finite never stays in it."""
    residual_N.sub_(decoded_N)
    clear_not_finite(residual_N)
