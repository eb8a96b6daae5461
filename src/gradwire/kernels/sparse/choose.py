"""The smallest format for a message, chosen by counts that all ranks know, and why in words.

Source: ZEN (OSDI 2025), section 3.3 and figure 17a.
Differences: the paper sends coordinates in Push and hash bitmaps in Pull; here sizes decide, so a
    pull of few entries takes coordinates, and a dense one no indices at all. Elias and Fano's
    code is considered as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ...contract.units import format_bytes
from .format import SparseFormat
from .formats.blocks import blocks
from .formats.coo import coo
from .formats.dense import dense
from .formats.elias_fano import elias_fano
from .formats.hash_bitmap import hash_bitmap

Formats = tuple[SparseFormat, ...]
LISTS: Formats = (coo(), hash_bitmap(), elias_fano())
"""The formats of a permuted part that list which units are sent."""
OF_PARTS: Formats = (dense(), *LISTS)
"""All formats that can carry a permuted part."""


@dataclass(frozen=True)
class FormatChoice:
    """A chosen format, and the bytes that it and the others considered would take."""

    count: int
    num_units: int
    sizes: tuple[tuple[SparseFormat, int], ...]
    """Each format that was considered and its bytes, smallest first; the first is chosen."""

    @property
    def format(self) -> SparseFormat:
        """The chosen format."""
        return self.sizes[0][0]

    @property
    def size_bytes(self) -> int:
        """The bytes of the chosen format."""
        return self.sizes[0][1]

    @property
    def why(self) -> str:
        """The choice in words, with the formats that it was compared with."""
        others = ", ".join(
            f"{format_bytes(size)} as {_name(form)}" for form, size in self.sizes[1:]
        )
        return (
            f"{_name(self.format)}: {format_bytes(self.size_bytes)} for {self.count} of "
            f"{self.num_units} units, against {others}"
        )


def smallest_format(
    count: int,
    num_units: int,
    width: int = 1,
    dtype: torch.dtype = torch.float32,
    *,
    among: Formats = OF_PARTS,
    num_blocks: int | None = None,
) -> FormatChoice:
    """The smallest format for ``count`` entries among ``num_units`` units (those of a part).

    Blocks can be considered only where ranks know how many are not zero (``num_blocks``). Where
    sizes are equal, the format that comes first in ``among`` wins; by default that is the one
    which is simplest to read.

    >>> smallest_format(500, 1000).format, smallest_format(10, 1000).size_bytes
    (hash_bitmap(), 52)
    """
    counts = {form: num_blocks if isinstance(form, blocks) else count for form in among}
    sizes = [
        (form, form.size_bytes(known, num_units, width, dtype))
        for form, known in counts.items()
        if known is not None
    ]
    return FormatChoice(count, num_units, tuple(sorted(sizes, key=lambda pair: pair[1])))


@lru_cache(maxsize=1024)
def smallest(
    among: Formats, count: int, num_units: int, width: int = 1, dtype: torch.dtype = torch.float32
) -> SparseFormat:
    """The format that ``smallest_format`` takes of ``among``.

    It is kept, because a step asks more than once about the same payload.
    """
    return smallest_format(count, num_units, width, dtype, among=among).format


def _name(form: SparseFormat) -> str:
    return type(form).__name__
