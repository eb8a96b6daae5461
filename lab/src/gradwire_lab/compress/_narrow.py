"""Whole numbers below a bound that both ends know, in 1 to 4 whole bytes each."""

import torch
from torch import Tensor

_INT32_BYTES = 4


def width_of(bound: int) -> int:
    """Bytes that hold every whole number in [0, bound), at least 1.

    >>> [width_of(bound) for bound in (1, 256, 257, 2**16, 2**24, 2**24 + 1)]
    [1, 1, 2, 2, 3, 4]
    """
    if bound <= 0:
        return 1
    return max(1, -(-(bound - 1).bit_length() // 8))


def narrow(numbers_K: Tensor, width: int, out: Tensor) -> Tensor:
    """Writes int32 numbers' low ``width`` bytes into ``out`` (uint8, K * width)."""
    count = numbers_K.numel()
    whole = numbers_K.view(torch.uint8).view(count, _INT32_BYTES)
    out.view(count, width).copy_(whole[:, :width])
    return out


def widen(packed: Tensor, width: int, out_K: Tensor) -> Tensor:
    """Reads numbers of ``width`` bytes (uint8, K * width) into ``out_K`` (int32)."""
    count = out_K.numel()
    whole = out_K.zero_().view(torch.uint8).view(count, _INT32_BYTES)
    whole[:, :width].copy_(packed.view(count, width))
    return out_K
