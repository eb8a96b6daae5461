"""The smallest format for a message, by counts that all ranks know, and why.

Source: ZEN (OSDI 2025), section 3.3 and figure 17a.
Differences: the paper sends coordinates in Push and hash bitmaps in Pull; here sizes
    decide, so a pull of few entries takes coordinates, and a dense one no indices at
    all. Elias and Fano's code is considered as well.
"""

from functools import lru_cache

import torch

from .format import SparseFormat
from .formats.coo import coo
from .formats.dense import dense
from .formats.elias_fano import elias_fano
from .formats.hash_bitmap import hash_bitmap

Formats = tuple[SparseFormat, ...]
LISTS: Formats = (coo(), hash_bitmap(), elias_fano())
"""The formats of a permuted part that list which units are sent."""
OF_PARTS: Formats = (dense(), *LISTS)
"""All formats that can carry a permuted part."""


@lru_cache(maxsize=1024)
def smallest(
    among: Formats,
    count: int,
    num_units: int,
    width: int = 1,
    dtype: torch.dtype = torch.float32,
) -> SparseFormat:
    """The smallest format for ``count`` entries among ``num_units`` units of a part.

    Where sizes are equal, the format that comes first in ``among`` wins. It is kept,
    because a step asks more than once about the same payload.

    >>> smallest(OF_PARTS, 500, 1000), smallest(OF_PARTS, 10, 1000).size_bytes(10, 1000)
    (hash_bitmap(), 52)
    """
    return min(among, key=lambda form: form.size_bytes(count, num_units, width, dtype))
