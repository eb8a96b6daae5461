"""Codes: integers of a few bits each, packed into bytes.

A byte holds ``8 // bits`` codes, the first of them in its lowest bits.
Legend: N codes, U bytes.
"""

import torch
from torch import Tensor


def packed_codes(codes_N: Tensor, bits: int) -> Tensor:
    """Codes of ``bits`` bits as bytes, the first in the lowest bits.

    Zeros behind the last.
    """
    per_byte = 8 // bits
    num_bytes = -(-codes_N.numel() // per_byte)
    padded = codes_N.new_zeros(num_bytes * per_byte, dtype=torch.uint8)
    padded[: codes_N.numel()] = codes_N
    first, *others = padded.view(num_bytes, per_byte).unbind(1)
    packed = first.clone()
    for place, codes in enumerate(others, start=1):
        packed |= codes << place * bits
    return packed


def unpacked_codes(bytes_U: Tensor, bits: int, numel: int) -> Tensor:
    """The first ``numel`` codes of ``bits`` bits in these bytes, as int32."""
    shifts = torch.arange(8 // bits, device=bytes_U.device, dtype=torch.int32) * bits
    codes: Tensor = (bytes_U.int()[:, None] >> shifts) & (2**bits - 1)
    return codes.reshape(-1)[:numel]
