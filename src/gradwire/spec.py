"""What is communicated, before any value exists: tensor specs and their chunks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import isqrt, prod

import torch

from .errors import invalid

CHUNK_ALIGNMENT = 8
"""Chunks start at multiples of 8 elements, so that bits fill whole bytes in every chunk."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, number of elements and dtype of one flat gradient, and what lies in it.

    ``shapes`` are those of the tensors that lie in it one behind the other, for algorithms that act
    on matrices; none stands for a single vector.

    >>> TensorSpec("fc.weight", 1000, shapes=((20, 50),)).size_bytes
    4000
    """

    name: str
    numel: int
    dtype: torch.dtype = torch.float32
    shapes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.numel < 0:
            raise invalid("numel", self.numel, "0 or more", "count the tensor's elements")
        if self.shapes and sum(map(prod, self.shapes)) != self.numel:
            accepted = f"shapes of {self.numel} elements in all"
            raise invalid("shapes", self.shapes, accepted, "give every tensor's shape")
        if not self.dtype.is_floating_point:
            raise invalid(
                "dtype", self.dtype, "a floating-point dtype", "gradients are floating point"
            )

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def chunk(self, start: int, stop: int) -> TensorSpec:
        """The spec of elements ``start`` to ``stop``: a vector."""
        return TensorSpec(f"{self.name}[{start}:{stop}]", stop - start, self.dtype)


def squarest(numel: int) -> tuple[tuple[int, ...], ...]:
    """Shapes for a gradient that belongs to no model: a square matrix, and the rest as a vector.

    >>> squarest(1000)
    ((31, 31), (39,))
    """
    side = isqrt(numel)
    rest = numel - side * side
    return ((side, side), (rest,)) if rest else ((side, side),)


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
