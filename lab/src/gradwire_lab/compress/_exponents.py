"""Exponents of float32 or bfloat16 in few bits, all other bits as they are.

Legend: N elements, B blocks of 4096 elements (the last may be shorter), C coded bytes,
K of one block.

A block of n exponents is one of two:

* n bytes: the exponents;
* fewer than n: 1 byte, the bits of a code, b from 1 to 5; the 2**b - 1 most frequent
  exponents, the most frequent first, of equals the lowest (0 where there are fewer); n
  codes of b bits, the first in the lowest bits; the exponents that are not among the
  most frequent.

A code is the place of an exponent among the most frequent, or 2**b - 1 for any other
exponent. The b is the one that makes the block shortest, the smallest of several.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.errors import RanksDiffer
from gradwire.kernels.codes import packed_codes, unpacked_codes
from gradwire.kernels.libraries import check_vector, loader

from ._reaching import SOURCES

_load_exponents = loader("exponents", SOURCES)

BLOCK = 4096
_MOST_BITS = 5
_UPPER = 0x80


class CodedExponents(NamedTuple):
    """Float32 or bfloat16 values, with their exponents coded."""

    low_N: Tensor | None
    """The lower 16 bits of float32 (int16); None for bfloat16."""
    rest_N: Tensor
    """The sign, and the upper seven bits below the exponent (uint8)."""
    sizes_B: Tensor
    """The bytes of each block's exponents (int32)."""
    codes_C: Tensor
    """The exponents, one block behind the other (uint8)."""


def encode_exponents(in_N: Tensor, into: CodedExponents, factor: float = 1.0) -> int:
    """Fills ``into``, whose last field has room for N bytes; returns C, how many of
    these it takes.

    ``in_N`` is float32, and is multiplied by ``factor``, or bfloat16, which goes as it
    is.
    """
    numel = in_N.numel()
    _check(into, in_N, numel)
    library = _load_exponents() if in_N.is_cpu else None
    if library is None:
        return _reference_encode(in_N, into, factor)
    return int(library.gw_exponents_encode(in_N, factor, numel, *into))


def decode_exponents(
    coded: CodedExponents, out_N: Tensor, factor: float = 1.0, *, add: bool = False
) -> None:
    """Overwrites ``out_N`` with ``factor`` times the values in its dtype, or adds them.

    Values of bfloat16 overwrite it as they are. Raises ``RanksDiffer`` where the codes
    are none: they may come from another rank. ``out_N`` then holds nothing of use.
    """
    numel = out_N.numel()
    num_codes = coded.codes_C.numel()
    _check(coded, out_N, num_codes)
    library = _load_exponents() if out_N.is_cpu else None
    if library is None:
        wrong = _reference_decode(coded, out_N, factor, add)
    else:
        wrong = library.gw_exponents_decode(
            *coded, num_codes, numel, out_N, factor, int(add)
        )
    if wrong == -2:
        raise MemoryError(
            f"exponents of {numel} elements: no memory for the places of blocks"
        )
    if wrong >= 0:
        raise RanksDiffer(
            f"exponents of a payload: block {wrong} is no code of {BLOCK} elements or "
            "fewer; give every rank the same gradwire, compressor and settings"
        )


def _check(coded: CodedExponents, value_N: Tensor, num_codes: int) -> None:
    numel = value_N.numel()
    is_wide = coded.low_N is not None
    check_vector("values", value_N, numel, torch.float32 if is_wide else torch.bfloat16)
    check_vector("low_N", coded.low_N, numel, torch.int16)
    check_vector("rest_N", coded.rest_N, numel, torch.uint8)
    check_vector("sizes_B", coded.sizes_B, -(-numel // BLOCK), torch.int32)
    check_vector("codes_C", coded.codes_C, num_codes, torch.uint8)


# ---- the reference -------------------------------------------------------------------


def _reference_encode(in_N: Tensor, into: CodedExponents, factor: float) -> int:
    if into.low_N is None:
        upper_N = in_N.view(torch.int16).int()
    else:
        if factor != 1.0:
            in_N = in_N * factor
        bits_N = in_N.view(torch.int32)
        into.low_N.copy_(bits_N)  # a narrower type takes the lower bits
        upper_N = bits_N >> 16
    into.rest_N.copy_(upper_N >> 8 & _UPPER | upper_N & 0x7F)
    exponent_N = upper_N >> 7 & 255
    blocks = [
        _encoded(block) for block in torch.split(exponent_N, BLOCK) if block.numel()
    ]
    sizes = [block.numel() for block in blocks]
    into.sizes_B.copy_(torch.tensor(sizes, dtype=torch.int32))
    for end, size, block in zip(accumulate(sizes), sizes, blocks, strict=True):
        into.codes_C[end - size : end] = block
    return sum(sizes)


def _encoded(exponents: Tensor) -> Tensor:
    total = exponents.numel()
    counts = exponents.bincount(minlength=256)
    common = counts.sort(descending=True, stable=True).indices

    def size(bits: int) -> int:
        with_code = common[: 2**bits - 1]
        num_others = total - int(counts[with_code].sum())
        return _coded_bytes(total, bits) + num_others

    bits = min(range(1, _MOST_BITS + 1), key=size)
    if size(bits) >= total:
        return exponents
    escape = 2**bits - 1
    num_kinds = int(counts.count_nonzero())
    coded = common[: min(escape, num_kinds)]
    places = torch.full((256,), escape, device=exponents.device)
    places[coded] = torch.arange(len(coded), device=exponents.device)
    codes = places[exponents]
    table = torch.nn.functional.pad(coded, (0, escape - len(coded)))
    shifts = torch.arange(bits, device=exponents.device)
    digits = codes[:, None] >> shifts & 1
    packed = packed_codes(digits.view(-1), 1)
    head = counts.new_tensor([bits])
    others = exponents[codes == escape]
    return torch.cat([head, table, packed, others])


def _coded_bytes(total: int, bits: int) -> int:
    """Bytes before the exponents that have no code of their own."""
    return (1 << bits) + -(-total * bits // 8)


def _reference_decode(
    coded: CodedExponents, out_N: Tensor, factor: float, add: bool
) -> int:
    """The first block that is no code, or -1."""
    sizes = coded.sizes_B.tolist()
    numel = out_N.numel()
    totals = [min(BLOCK, numel - at) for at in range(0, numel, BLOCK)]
    for place, (size, total) in enumerate(zip(sizes, totals, strict=True)):
        if not 1 <= size <= total:
            return place
    if sum(sizes) != coded.codes_C.numel():
        return len(sizes) - 1
    exponent_N = torch.empty(numel, dtype=torch.int32, device=out_N.device)
    blocks = torch.split(coded.codes_C, sizes)
    # Without elements there is one empty piece, and no block.
    pieces = zip(blocks, torch.split(exponent_N, BLOCK), strict=False)
    for place, (block, exponents) in enumerate(pieces):
        decoded = _decoded(block, exponents.numel())
        if decoded is None:
            return place
        exponents.copy_(decoded)
    rest_N = coded.rest_N.int()
    upper_N = (rest_N & _UPPER) << 8 | exponent_N << 7 | rest_N & 0x7F
    if coded.low_N is None:
        half_N = upper_N.to(torch.int16)
        out_N.copy_(half_N.view(torch.bfloat16))
        return -1
    low_N = coded.low_N.int() & 0xFFFF
    bits_N = upper_N << 16 | low_N
    value_N = bits_N.view(torch.float32)
    if factor != 1.0:
        value_N = value_N * factor
    if add:
        out_N.add_(value_N)
    else:
        out_N.copy_(value_N)
    return -1


def _decoded(block_K: Tensor, total: int) -> Tensor | None:
    """The exponents of one block; None where it is no code."""
    if block_K.numel() == total:
        return block_K
    bits = int(block_K[0])
    if not 1 <= bits <= _MOST_BITS:
        return None
    others = _coded_bytes(total, bits)
    if others > block_K.numel():
        return None
    escape = 2**bits - 1
    first = escape + 1
    shifts = torch.arange(bits, device=block_K.device)
    packed = block_K[first:others]
    digits = unpacked_codes(packed, 1, total * bits)
    codes = digits.view(total, bits)
    places = (codes << shifts).sum(1)
    is_other = places == escape
    if int(is_other.sum()) != block_K.numel() - others:
        return None
    exponents = block_K[(places + 1) % first]
    exponents[is_other] = block_K[others:]
    return exponents
