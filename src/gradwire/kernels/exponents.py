"""The exponents of float32 or bfloat16 in prefix codes, all other bits as they are.

Legend: N elements, B blocks of 4096 elements (the last may be shorter), C coded bytes.

A block of n exponents is one of three:

* n bytes: the exponents;
* 1 byte: the exponent that all have;
* fewer than n: the lowest exponent but 0; the highest less that; the length of the code of 0 and of
  every exponent from the lowest to the highest, in 4 bits each (lower half first, 0 where there is
  none); the bytes of the first three streams, 16 bits each; four streams of codes.

A stream has ceil(n / 4) elements, the last ones fewer or none, and fills its last byte with zeros.
Codes have 1 to 12 bits, their upper bit first, and are complete. Shorter ones come first, then
those of lower exponents, each one more than that before it.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import RanksDiffer
from .libraries import check_vector, loader

_load_exponents = loader("exponents")

BLOCK = 4096
_STREAMS = 4
_LONGEST = 12
_WHOLE = 1 << _LONGEST
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
    """Fills ``into``, whose last field has room for N bytes; returns C, how many of these it takes.

    ``in_N`` is float32, and is multiplied by ``factor``, or bfloat16, which goes as it is.
    """
    numel, is_wide = in_N.numel(), into.low_N is not None
    check_vector("in_N", in_N, numel, torch.float32 if is_wide else torch.bfloat16)
    _check(into, numel, numel)
    library = _load_exponents() if in_N.is_cpu else None
    if library is None:
        return _reference_encode(in_N if factor == 1.0 else in_N * factor, into)
    assert is_wide or factor == 1.0
    return int(library.gw_exponents_encode(in_N, factor, numel, *into))


def decode_exponents(
    coded: CodedExponents, out_N: Tensor, factor: float = 1.0, *, add: bool = False
) -> None:
    """Overwrites ``out_N`` with ``factor`` times the values; with ``add`` adds them to it.

    ``out_N`` is float32, or bfloat16 for values of bfloat16, which then go as they are. Raises
    ``RanksDiffer`` where the codes are none: they may come from another rank.
    """
    numel, is_wide = out_N.numel(), out_N.dtype == torch.float32
    check_vector("out_N", out_N, numel, torch.float32, torch.bfloat16)
    _check(coded, numel, coded.codes_C.numel())
    assert factor == 1.0 or (is_wide and not add)
    assert is_wide or (coded.low_N is None and not add)
    library = _load_exponents() if out_N.is_cpu else None
    if library is None:
        wrong = _reference_decode(coded, out_N, factor, add=add)
    else:
        sizes = (coded.codes_C.numel(), numel, out_N, not is_wide)
        wrong = library.gw_exponents_decode(*coded, *sizes, factor, add)
    if wrong == -2:
        raise MemoryError(f"exponents of {numel} elements: no memory for the places of blocks")
    if wrong >= 0:
        raise RanksDiffer(
            f"exponents of a payload: block {wrong} is no code of {BLOCK} elements or fewer; give "
            "every rank the same gradwire, compressor and settings"
        )


def _check(coded: CodedExponents, numel: int, num_codes: int) -> None:
    if coded.low_N is not None:
        check_vector("low_N", coded.low_N, numel, torch.int16)
    check_vector("rest_N", coded.rest_N, numel, torch.uint8)
    check_vector("sizes_B", coded.sizes_B, -(-numel // BLOCK), torch.int32)
    check_vector("codes_C", coded.codes_C, num_codes, torch.uint8)


# ---- the reference -----------------------------------------------------------------------------


def _reference_encode(in_N: Tensor, into: CodedExponents) -> int:
    if into.low_N is None:
        upper_N = in_N.view(torch.int16).int()
    else:
        bits_N = in_N.view(torch.int32)
        into.low_N.copy_(bits_N)  # a narrower type takes the lower bits
        upper_N = bits_N >> 16
    into.rest_N.copy_(upper_N >> 8 & _UPPER | upper_N & 0x7F)
    exponents = bytes((upper_N >> 7 & 255).tolist())
    blocks = [_encoded(exponents[at : at + BLOCK]) for at in range(0, len(exponents), BLOCK)]
    into.sizes_B.copy_(torch.tensor(list(map(len, blocks)), dtype=torch.int32))
    coded = b"".join(blocks)
    into.codes_C[: len(coded)].copy_(torch.tensor(list(coded), dtype=torch.uint8))
    return len(coded)


def _encoded(exponents: bytes) -> bytes:
    counts = Counter(exponents)
    if len(counts) == 1:
        return exponents[:1]
    lengths = _lengths(counts, len(exponents))
    lowest, highest = min(v for v in counts if v), max(counts)
    listed = [lengths.get(v, 0) for v in (0, *range(lowest, highest + 1))]
    header = bytes([lowest, highest - lowest]) + bytes(
        one | other << 4 for one, other in zip(listed[::2], [*listed[1::2], 0], strict=False)
    )
    size_bits = sum(counts[v] * lengths[v] for v in counts)
    if len(header) + 2 * (_STREAMS - 1) + size_bits // 8 + _STREAMS >= len(exponents):
        return exponents
    codes = _codes(lengths)
    streams = []
    for first, last in _bounds(len(exponents)):
        text = "".join(codes[v] for v in exponents[first:last])
        size = -(-len(text) // 8)
        streams.append(int(text.ljust(8 * size, "0") or "0", 2).to_bytes(size, "big"))
    sizes = (len(stream).to_bytes(2, "little") for stream in streams[:-1])
    return b"".join((header, *sizes, *streams))


def _lengths(counts: Counter[int], total: int) -> dict[int, int]:
    """Every exponent's share, rounded up to a power of two; what the sum then lacks of 1 goes to
    those that gain most by a bit less."""
    found = {v: (-(-total // count) - 1).bit_length() for v, count in sorted(counts.items())}
    spare = _WHOLE - sum(_WHOLE >> length for length in found.values())
    while spare:
        fitting = [v for v in found if _WHOLE >> found[v] <= spare]
        best = max(fitting, key=lambda v: counts[v] << found[v])
        spare -= _WHOLE >> found[best]
        found[best] -= 1
    return found


def _codes(lengths: dict[int, int]) -> dict[int, str]:
    """The bits of each exponent, as text."""
    codes, at = {}, 0
    for v in sorted((v for v in lengths if lengths[v]), key=lambda v: (lengths[v], v)):
        codes[v] = format(at >> (_LONGEST - lengths[v]), f"0{lengths[v]}b")
        at += _WHOLE >> lengths[v]
    return codes


def _bounds(total: int) -> list[tuple[int, int]]:
    part = -(-total // _STREAMS)
    return list(pairwise(min(i * part, total) for i in range(_STREAMS + 1)))


def _reference_decode(coded: CodedExponents, out_N: Tensor, factor: float, *, add: bool) -> int:
    """The first block that is no code, or -1."""
    codes, exponents = bytes(coded.codes_C.tolist()), []
    sizes = coded.sizes_B.tolist()
    totals = [min(BLOCK, out_N.numel() - at) for at in range(0, out_N.numel(), BLOCK)]
    for place, (size, total) in enumerate(zip(sizes, totals, strict=True)):
        if not 1 <= size <= total:
            return place
    if sum(sizes) != len(codes):
        return len(sizes) - 1
    ends = list(accumulate(sizes))
    for place, (end, size, total) in enumerate(zip(ends, sizes, totals, strict=True)):
        found = _decoded(codes[end - size : end], total)
        if found is None:
            return place
        exponents.append(found)
    exponent_N = torch.tensor(list(b"".join(exponents)), dtype=torch.int32, device=out_N.device)
    rest_N = coded.rest_N.int()
    upper_N = (rest_N & _UPPER) << 8 | exponent_N << 7 | rest_N & 0x7F
    if coded.low_N is None:
        value_N = upper_N.to(torch.int16).view(torch.bfloat16)
        if out_N.dtype == torch.float32:
            value_N = (upper_N << 16).view(torch.float32)
    else:
        value_N = (upper_N << 16 | coded.low_N.int() & 0xFFFF).view(torch.float32)
    if add:
        out_N.add_(value_N)
    else:
        out_N.copy_(value_N if factor == 1.0 else value_N * factor)
    return -1


def _decoded(block: bytes, total: int) -> bytes | None:
    """The exponents of one block; None where it is no code."""
    if len(block) == total:
        return block
    if len(block) == 1:
        return block * total
    lowest, highest = block[0], block[0] + block[1]
    first = 2 + (highest - lowest + 3) // 2
    at = first + 2 * (_STREAMS - 1)
    if not lowest or highest > 255 or at > len(block):
        return None
    halves = [half for byte in block[2:first] for half in (byte & 15, byte >> 4)]
    lengths = dict(zip((0, *range(lowest, highest + 1)), halves, strict=False))
    if max(lengths.values()) > _LONGEST:
        return None
    if sum(_WHOLE >> length for length in lengths.values() if length) != _WHOLE:
        return None
    sizes = [int.from_bytes(block[i : i + 2], "little") for i in range(first, at, 2)]
    sizes.append(len(block) - at - sum(sizes))
    if sizes[-1] < 0:
        return None
    exponent_of = {code: v for v, code in _codes(lengths).items()}
    found = bytearray()
    for size, (start, stop) in zip(sizes, _bounds(total), strict=True):
        text = format(int.from_bytes(block[at : at + size], "big"), f"0{8 * size}b") if size else ""
        own, place = _read(exponent_of, text, stop - start)
        if -(-place // 8) != size:
            return None
        found += own
        at += size
    return bytes(found)


def _read(exponent_of: dict[str, int], text: str, count: int) -> tuple[bytes, int]:
    """The first ``count`` exponents of a stream, and how many of its bits they take.

    Behind its end a stream goes on with zeros.
    """
    found, place = bytearray(), 0
    text += "0" * (count * _LONGEST)
    for _ in range(count):
        length = 1
        while text[place : place + length] not in exponent_of:
            length += 1
        found.append(exponent_of[text[place : place + length]])
        place += length
    return bytes(found), place
