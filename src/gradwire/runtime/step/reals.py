"""Reals: complex parameters travel as real views, real and imaginary parts in turn.

A complex matrix of n x m is a real one of n x 2m, and a vector stays a vector. So messages, plans,
residuals and saved states know real numbers only.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...errors import invalid
from ...planning.default_fusion import NamedParam


def as_reals(tensor: Tensor) -> Tensor:
    """A real view of a complex tensor, without a graph; any other tensor itself.

    Its last dimension is twice as long, or is one more where elements of the last dimension do not
    lie side by side in memory.
    """
    if not tensor.is_complex():
        return tensor
    pairs = torch.view_as_real(tensor.detach())
    lies_flat = tensor.dim() > 0 and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1)
    return pairs.view(*tensor.shape[:-1], 2 * tensor.shape[-1]) if lies_flat else pairs


def grad_as_reals(grad: Tensor, shape: torch.Size) -> Tensor:
    """A real view of a complex gradient in its parameter's shape as reals; any other itself.

    A copy stands for a gradient of which there is no such view: lazily conjugated, or laid out in
    another order than its parameter.
    """
    if not grad.is_complex():
        return grad
    whole = grad.detach().resolve_conj()
    reals = as_reals(whole)
    return reals if reals.shape == shape else torch.view_as_real(whole.contiguous()).view(shape)


def as_complex(reals: Tensor, like: Tensor) -> Tensor:
    """A tensor in the shape of ``like``: the complex view of ``reals``, if ``like`` is complex."""
    if not like.is_complex():
        return reals
    return torch.view_as_complex(reals.contiguous().view(*like.shape, 2))


def refuse_complex(params: Iterable[NamedParam], what: str, remedy: str) -> None:
    """Raises ``InvalidSetting`` if any of these parameters is complex, as ``what`` knows none."""
    for name, param in params:
        if param.is_complex():
            given = str(param.dtype).removeprefix("torch.")
            raise invalid(f"dtype of parameter {name}", given, f"a real one {what}", remedy)
