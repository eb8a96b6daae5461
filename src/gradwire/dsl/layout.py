"""The layout of a program's fields: the format of a payload, and what its size tells.

Legend: N elements of the gradient, K kept ones. Fields of kept elements lie behind all others, in
order of the program; how many entries they have follows from the payload's size alone.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ..contract.payload import Field, Format
from ..errors import invalid
from .ir import FLOAT32, INT32, UNSIGNED, Buffer, DType, Extent
from .rewrite import Traced

MEMORY: dict[DType, torch.dtype] = {FLOAT32: torch.float32, INT32: torch.int32}
"""The dtypes of values that are not packed; unsigned ones lie in bytes."""


def most_kept(program: Traced, numel: int) -> int:
    """K at most: what ``top`` leaves of N elements, or all of them."""
    if program.keep is None or not numel:
        return 0
    return numel if program.top is None else max(1, round(program.top * numel))


@lru_cache(maxsize=4096)
def program_format(program: Traced, numel: int, num_kept: int) -> Format:
    """The format of a payload of so many elements, of which so many were kept.

    Raises ``InvalidSetting`` where an int32 cannot tell the elements' places.
    """
    if numel >= 2**31 and (program.keep is not None or program.stages):
        given = f"{numel} elements"
        raise invalid(f"{program.name} gradient", given, "below 2**31", "cut it into chunks")
    counts = {
        Extent.CALL: min(numel, 1),
        Extent.BLOCK: -(-numel // program.block),
        Extent.ELEMENT: numel,
        Extent.KEPT: num_kept,
    }
    return Format(tuple(_field(buffer, counts[buffer.extent]) for buffer in program.buffers))


def num_received(program: Traced, numel: int, size_bytes: int) -> int | None:
    """K of a payload of so many bytes; None if no payload is that long."""
    num_kept = most_kept(program, numel)
    if num_kept:
        entry_bytes = sum(buffer.dtype.bits for buffer in program.kept) / 8
        first = program_format(program, numel, 0).size_bytes
        # Each field may be up to a group of codes longer than its entries' bits: never shorter.
        num_kept = min(max(0, int((size_bytes - first) / entry_bytes) + 1), num_kept)
    while num_kept and program_format(program, numel, num_kept).size_bytes > size_bytes:
        num_kept -= 1
    fits = program_format(program, numel, num_kept).size_bytes == size_bytes
    return num_kept if fits else None


def _field(buffer: Buffer, count: int) -> Field:
    if buffer.dtype not in UNSIGNED:
        return Field(buffer.name, MEMORY[buffer.dtype], count)
    packed = buffer.extent >= Extent.ELEMENT
    return Field(buffer.name, torch.uint8, buffer.dtype.packed_bytes(count) if packed else count)
