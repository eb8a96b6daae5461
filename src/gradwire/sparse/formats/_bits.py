"""Bits that say which units are there: the half that both bitmaps share.

Bit i is bit i % 8, counted from the lowest, of byte i // 8. Bits behind the last unit are zeros.
Legend: K entries, B bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import InvalidSetting, invalid
from ...kernels._build import load_library
from ...kernels._operands import address, serves_cpp
from ...payload import Field, Format, Payload
from ..entries import Entries
from ..parts import Part
from ..scatter import check_out, target_arguments
from ..scatter import scatter as scatter_entries


def layout(count: int, num_units: int, width: int, dtype: torch.dtype) -> Format:
    """Values, then bits: so values lie aligned and no gap is needed."""
    bits = Field("bits", torch.uint8, num_bytes(num_units))
    return Format((Field("values", dtype, count * width), bits))


def num_bytes(num_units: int) -> int:
    """Of one bit a unit."""
    return -(-num_units // 8)


def encode(entries: Entries, num_units: int, buffer: Tensor | None) -> Payload:
    """Entries ascending, without duplicates."""
    indices_K, values, width = entries
    form = layout(indices_K.numel(), num_units, width, values.dtype)
    payload = Payload.empty(form, buffer, values.device)
    payload["values"].copy_(values)
    write(indices_K, num_units, payload["bits"])
    return payload


def decode(payload: Payload, num_units: int, width: int) -> Entries:
    """Ascending; values are a view of the payload."""
    values = payload["values"]
    return Entries(read(payload["bits"], num_units, values.numel() // width), values, width)


def scatter(payload: Payload, part: Part, out_N: Tensor, scale: float, width: int) -> None:
    """``sparse.scatter`` of what ``decode`` gives, in one pass over the bits."""
    values = payload["values"]
    library = load_library("bits") if serves_cpp(values, out_N) else None
    if library is None:
        scatter_entries(decode(payload, part.length, width), part, out_N, scale)
        return
    check_out(part, out_N, width)
    count = values.numel() // width
    library.gw_bits_scatter.restype = ctypes.c_int64
    found = library.gw_bits_scatter(
        address(payload["bits"]),
        ctypes.c_int64(part.length),
        address(values),
        ctypes.c_int64(count),
        *target_arguments(part, out_N, width, scale),
    )
    check_found(found, count, part.length)


def fill(payloads: Sequence[Payload], parts: Sequence[Part], out_N: Tensor, scale: float) -> bool:
    """``SparseFormat.fill`` for units of one element; False where the C++ cannot serve.

    One write to each line of memory, where ``scatter`` jumps from entry to entry: of 25 M float32
    with 2 M entries it takes 0.6 of the time.
    """
    values = [payload["values"] for payload in payloads]
    library = load_library("fill") if serves_cpp(*values, out_N) else None
    if library is None:
        return False
    counts = [value.numel() for value in values]
    bits = [payload["bits"].data_ptr() for payload in payloads]
    library.gw_bits_fill.restype = ctypes.c_int64
    permutation, number = parts[0].permutation, len(parts)
    wrong = library.gw_bits_fill(
        (ctypes.c_void_p * number)(*bits),
        (ctypes.c_void_p * number)(*[value.data_ptr() for value in values]),
        (ctypes.c_int64 * number)(*[part.length for part in parts]),
        (ctypes.c_int64 * number)(*counts),
        ctypes.c_int64(number),
        None if permutation is None else permutation.constants,
        address(out_N),
        ctypes.c_int64(out_N.numel()),
        ctypes.c_float(scale),
        torch.get_num_threads(),
    )
    if wrong == NO_MEMORY:
        raise MemoryError(f"{sum(counts)} entries: no memory to sort them by windows")
    if wrong >= 0:
        read(payloads[wrong]["bits"], parts[wrong].length, counts[wrong])  # says what is wrong
    return True


def write(indices_K: Tensor, num_units: int, bits_B: Tensor) -> None:
    """Sets the bits of ``indices_K`` and clears all others.

    Raises InvalidSetting unless indices ascend strictly and are in [0, num_units).
    """
    library = _library(indices_K, bits_B)
    if library is None:
        bad = _first_that_does_not_ascend(indices_K, num_units)
        if bad < 0:
            _reference_write(indices_K, bits_B)
    else:
        library.gw_bits_write.restype = ctypes.c_int64
        bad = library.gw_bits_write(
            address(indices_K),
            ctypes.c_int64(indices_K.numel()),
            ctypes.c_int64(num_units),
            address(bits_B),
        )
    if bad >= 0:
        raise InvalidSetting(
            f"entry {bad} of a bitmap of {num_units} units has index {int(indices_K[bad])}; "
            "indices must ascend, without duplicates, from 0 to less than that"
        )


def read(bits_B: Tensor, num_units: int, count: int) -> Tensor:
    """The set bits, ascending, int32; a new tensor.

    Raises InvalidSetting unless there are ``count`` of them, all below ``num_units``.
    """
    library = _library(bits_B)
    if library is None:
        set_K = flags(bits_B).nonzero().squeeze(1)
        found = STRAY if set_K.numel() and int(set_K[-1]) >= num_units else set_K.numel()
        out_K = set_K.int()
    else:
        out_K = torch.empty(count, dtype=torch.int32)
        library.gw_bits_read.restype = ctypes.c_int64
        found = library.gw_bits_read(
            address(bits_B),
            ctypes.c_int64(num_units),
            ctypes.c_int64(count),
            address(out_K),
            torch.get_num_threads(),
        )
    check_found(found, count, num_units)
    return out_K


def count(bits_B: Tensor, num_units: int) -> int:
    """How many of the first ``num_units`` bits are set; those behind them are not."""
    library = _library(bits_B)
    if library is None:
        return int(flags(bits_B).sum())
    library.gw_bits_count.restype = ctypes.c_int64
    found: int = library.gw_bits_count(
        address(bits_B), ctypes.c_int64(num_units), torch.get_num_threads()
    )
    check_found(found, max(found, 0), num_units)
    return found


def flags(bits_B: Tensor) -> Tensor:
    """One bool for each bit."""
    shifts_8 = torch.arange(8, dtype=torch.uint8, device=bits_B.device)
    return (bits_B[:, None] >> shifts_8 & 1).view(-1).bool()


STRAY, NO_MEMORY = -3, -2
"""What the C++ answers where a bit behind the last unit is set, and where it got no memory."""


def check_found(found: int, count: int, num_units: int) -> None:
    """Raises InvalidSetting where bits and values do not belong together."""
    if found == NO_MEMORY:
        raise MemoryError(f"bitmap of {num_units} units: no memory for the counts of its blocks")
    if found != count:
        given = "set bits behind the last unit" if found == STRAY else f"{found} set bits"
        raise invalid(
            "bitmap",
            given,
            f"one of {count} set bits, all of the first {num_units}",
            "give every rank the same vector, world and permutation",
        )


def _library(*tensors: Tensor) -> ctypes.CDLL | None:
    return load_library("bits") if all(one.device.type == "cpu" for one in tensors) else None


def _reference_write(indices_K: Tensor, bits_B: Tensor) -> None:
    one_per_unit = torch.zeros(bits_B.numel() * 8, dtype=torch.uint8, device=bits_B.device)
    one_per_unit[indices_K.long()] = 1
    weights_8 = 1 << torch.arange(8, device=bits_B.device)
    bits_B.copy_((one_per_unit.view(-1, 8) * weights_8).sum(1))


def _first_that_does_not_ascend(indices_K: Tensor, num_units: int) -> int:
    before_K = torch.cat([indices_K.new_full((1,), -1), indices_K[:-1]])[: indices_K.numel()]
    wrong = ((indices_K <= before_K) | (indices_K >= num_units)).nonzero()
    return int(wrong[0]) if wrong.numel() else -1
