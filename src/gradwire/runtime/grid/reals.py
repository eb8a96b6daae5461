"""Complex tensors as reals: views of the same memory, and the way back."""

import torch
from torch import Tensor


def as_reals(tensor: Tensor) -> Tensor:
    """A real view of a complex tensor, without a graph; any other tensor itself.

    Its last dimension is twice as long, or is one more where elements of the last
    dimension do not lie side by side in memory.
    """
    if not tensor.is_complex():
        return tensor
    pairs = torch.view_as_real(tensor.detach())
    if not tensor.dim():
        return pairs
    *others, last = tensor.shape
    lies_flat = tensor.stride(-1) == 1 or last == 1
    return pairs.view(*others, 2 * last) if lies_flat else pairs


def grad_as_reals(grad: Tensor, shape: torch.Size) -> Tensor:
    """A real view of a complex gradient in its parameter's shape as reals.

    Any other itself.

    A copy replaces a gradient without such a view: a lazily conjugated one, or one that
    is laid out in another order than its parameter.
    """
    if not grad.is_complex():
        return grad
    whole = grad.detach().resolve_conj()
    reals = as_reals(whole)
    return (
        reals
        if reals.shape == shape
        else torch.view_as_real(whole.contiguous()).view(shape)
    )


def as_complex(reals: Tensor, like: Tensor) -> Tensor:
    """A tensor in the shape of ``like``: complex from ``reals``, if ``like`` is.

    It has the memory of ``reals`` if both lie in order, else its own, with the strides
    of ``like``.
    """
    if not like.is_complex():
        return reals
    pairs = reals.reshape(*like.shape, 2)
    if like.is_contiguous():
        return torch.view_as_complex(pairs.contiguous())
    made = torch.empty_like(like)
    torch.view_as_real(made).copy_(pairs)
    return made
