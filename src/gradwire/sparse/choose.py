"""The smallest format for a message, from what all ranks know of it, and why in words.

Source: ZEN (OSDI 2025), section 3.3 and figure 17a.
Differences: the paper sends coordinates in Push and hash bitmaps in Pull; here sizes decide, so a
    pull of few entries takes coordinates, and a dense one no indices at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..units import format_bytes
from .formats._types import SparseFormat
from .formats.bitmap import bitmap
from .formats.blocks import blocks
from .formats.coo import coo
from .formats.dense import dense
from .formats.hash_bitmap import hash_bitmap


@dataclass(frozen=True)
class Choice:
    """A format, and what it and all others would take."""

    format: SparseFormat
    sizes: tuple[tuple[SparseFormat, int], ...]
    """Bytes of each that was considered, smallest first; the first is the chosen one."""
    why: str

    @property
    def size_bytes(self) -> int:
        """Of the chosen one."""
        return self.sizes[0][1]


def choose(
    count: int,
    num_units: int,
    width: int = 1,
    dtype: torch.dtype = torch.float32,
    *,
    hashed: bool = True,
    num_blocks: int | None = None,
    block: int = 256,
) -> Choice:
    """The smallest format for ``count`` entries among ``num_units`` units (those of a part).

    ``hashed`` says that the part is a permuted one: its bitmap is a hash bitmap. Blocks can be
    considered only where ranks know how many are not zero (``num_blocks``). Of equal sizes the one
    that is simpler to read wins: dense, coo, bitmap, blocks.

    >>> choose(10, 1000).why
    'coo: 80 B for 10 of 1000 units, against 165 B as hash_bitmap, 4.00 kB as dense'
    """
    bits = hash_bitmap() if hashed else bitmap()
    counts: list[tuple[SparseFormat, int]] = [(dense(), count), (coo(), count), (bits, count)]
    if num_blocks is not None:
        counts.append((blocks(block=block), num_blocks))
    sizes = [(form, form.size_bytes(n, num_units, width, dtype)) for form, n in counts]
    ordered = tuple(sorted(sizes, key=lambda pair: pair[1]))
    best, size_bytes = ordered[0]
    others = ", ".join(f"{format_bytes(size)} as {_name(form)}" for form, size in ordered[1:])
    why = (
        f"{_name(best)}: {format_bytes(size_bytes)} for {count} of {num_units} units, "
        f"against {others}"
    )
    return Choice(best, ordered, why)


def _name(form: SparseFormat) -> str:
    return type(form).__name__
