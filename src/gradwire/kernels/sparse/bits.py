"""Bitmaps: a bit for each unit tells whether it is sent; formats share these functions.

Bit i is bit i % 8, counted from the lowest, of byte i // 8. Bits behind the last unit
are zeros. Legend: K entries, B bytes.
"""

import ctypes

import torch
from torch import Tensor

from ...errors import InvalidSetting, invalid
from ..codes import packed_codes, unpacked_codes
from ..libraries import loader
from .entries import first_wrong

_load_bits = loader("bits")


def num_bytes(num_units: int) -> int:
    """The bytes of a bitmap with one bit for each unit."""
    return -(-num_units // 8)


def write(indices_K: Tensor, num_units: int, bits_B: Tensor) -> None:
    """Sets the bits of ``indices_K`` and clears all others.

    Raises InvalidSetting unless indices ascend strictly and are in [0, num_units).
    """
    library = _library(indices_K, bits_B)
    if library is None:
        bad = first_wrong(indices_K, num_units, strictly=True)
        if bad < 0:
            set_places(indices_K, bits_B)
    else:
        bad = library.gw_bits_write(indices_K, indices_K.numel(), num_units, bits_B)
    if bad >= 0:
        raise InvalidSetting(
            f"entry {bad} of a bitmap of {num_units} units has index "
            f"{int(indices_K[bad])}; "
            "indices must ascend, without duplicates, from 0 to less than that"
        )


def read(
    bits_B: Tensor, num_units: int, count: int, room: Tensor | None = None
) -> Tensor:
    """The numbers of the set bits, ascending, int32, in ``room`` or a new tensor.

    Raises InvalidSetting unless there are ``count`` of them, all below ``num_units``.
    """
    library = _library(bits_B)
    if library is None:
        set_K = flags(bits_B).nonzero().squeeze(1)
        num_set = (
            STRAY if set_K.numel() and int(set_K[-1]) >= num_units else set_K.numel()
        )
        out_K = set_K.int()
    else:
        out_K = torch.empty(count, dtype=torch.int32) if room is None else room[:count]
        num_set = library.gw_bits_read(bits_B, num_units, count, out_K)
    check_found(num_set, count, num_units)
    return out_K


def flags(bits_B: Tensor) -> Tensor:
    """The bits as bools, one for each."""
    return unpacked_codes(bits_B, 1, 8 * bits_B.numel()).bool()


STRAY = -3
NO_MEMORY = -2
"""The C++'s answers for a bit behind the last unit, and for memory it did not get."""


def check_found(num_set: int, count: int, num_units: int) -> None:
    """Raises InvalidSetting where bits and values do not belong together."""
    if num_set == NO_MEMORY:
        raise MemoryError(
            f"bitmap of {num_units} units: no memory for the counts of its blocks"
        )
    if num_set != count:
        given = (
            "set bits behind the last unit"
            if num_set == STRAY
            else f"{num_set} set bits"
        )
        raise invalid(
            "bitmap",
            given,
            f"one of {count} set bits, all of the first {num_units}",
            "give every rank the same vector, world and permutation",
        )


def _library(*tensors: Tensor) -> ctypes.CDLL | None:
    return (
        _load_bits() if all(tensor.device.type == "cpu" for tensor in tensors) else None
    )


def pack(flags: Tensor, bits_B: Tensor) -> None:
    """Writes bools as bits; ``flags`` reads them back."""
    bits_B.copy_(packed_codes(flags.int(), 1))


def set_places(indices_K: Tensor, bits_B: Tensor) -> None:
    """Sets the bits of ``indices_K`` and clears all others, unchecked."""
    is_set = torch.zeros(bits_B.numel() * 8, dtype=torch.bool, device=bits_B.device)
    is_set[indices_K.long()] = True
    pack(is_set, bits_B)
