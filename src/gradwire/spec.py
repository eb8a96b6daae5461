"""What is communicated, before any value exists: tensor specs and their chunks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from .errors import invalid

CHUNK_ALIGNMENT = 8
"""Chunks start at multiples of 8 elements, so that bits fill whole bytes in every chunk."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, number of elements and dtype of one flat gradient.

    >>> TensorSpec("fc.weight", 1000).size_bytes
    4000
    """

    name: str
    numel: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.numel < 0:
            raise invalid("numel", self.numel, "0 or more", "count the tensor's elements")
        if not self.dtype.is_floating_point:
            raise invalid(
                "dtype", self.dtype, "a floating-point dtype", "gradients are floating point"
            )

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def chunk(self, start: int, stop: int) -> TensorSpec:
        """The spec of elements ``start`` to ``stop``."""
        return TensorSpec(f"{self.name}[{start}:{stop}]", stop - start, self.dtype)


@lru_cache(maxsize=4096)
def chunk_bounds(numel: int, num_chunks: int) -> tuple[tuple[int, int], ...]:
    """Cuts ``numel`` elements into ``num_chunks`` flat ranges of equal, aligned length.

    The first chunk is never shorter than a later one; trailing chunks may be empty.

    >>> chunk_bounds(20, 3)
    ((0, 8), (8, 16), (16, 20))
    """
    length = -(-numel // num_chunks)
    length = -(-length // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
    edges = [min(i * length, numel) for i in range(num_chunks + 1)]
    return tuple(pairwise(edges))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and residuals: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
