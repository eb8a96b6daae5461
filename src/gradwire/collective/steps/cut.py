"""Cuts of gradients into parts, and the payloads of parts: all that is known before any value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...contract.payload import Format
from ...contract.spec import working_dtype
from ...kernels.sparse.format import SparseFormat
from ...kernels.sparse.parts import Part, part_length, parts_of
from ...kernels.sparse.permutation import Permutation


@dataclass(frozen=True)
class Cut:
    """The parts of a gradient and the dtypes in which they travel: known before any value."""

    numel: int
    width: int
    """Elements of a unit."""
    parts: tuple[Part, ...]
    pushed_dtype: torch.dtype
    pulled_dtype: torch.dtype
    """The gradient's own: sums in the working dtype are rounded to it once, as any mean is."""
    is_listed: bool = False
    """Pulls must tell which units there are, as the dense format does not."""

    @property
    def num_units(self) -> int:
        return self.parts[0].num_units

    @property
    def permutation(self) -> Permutation | None:
        return self.parts[0].permutation

    @property
    def sum_dtype(self) -> torch.dtype:
        return working_dtype(self.pulled_dtype)

    def pushed(self, form: SparseFormat, server: int, count: int) -> Format:
        """The payload of so many units on their way to a server."""
        return form.layout(count, self.parts[server].length, self.width, self.pushed_dtype)

    def pulled(self, form: SparseFormat, rank: int, count: int) -> Format:
        """The payload of so many units that ``rank`` merged."""
        return form.layout(count, self.parts[rank].length, self.width, self.pulled_dtype)

    def by_part(self, indices_K: Tensor) -> list[int]:
        """How many of these units lie in each part."""
        places_K = indices_K if self.permutation is None else self.permutation.places(indices_K)
        world = len(self.parts)
        length = max(1, part_length(self.num_units, world))
        counts: list[int] = (places_K // length).bincount(minlength=world).tolist()
        return counts

    def counts(self, sets: Sequence[Tensor]) -> tuple[list[list[int]], list[int]]:
        """Units that each worker pushes to each server, and that each server then holds."""
        is_taken = torch.zeros(self.num_units, dtype=torch.bool)
        for indices_K in sets:
            is_taken[indices_K.long()] = True
        union = is_taken.nonzero()[:, 0].to(torch.int32)
        return [self.by_part(indices_K) for indices_K in sets], self.by_part(union)


@lru_cache(maxsize=256)
def cached_parts(num_units: int, world: int, permutation: Permutation | None) -> tuple[Part, ...]:
    """``parts_of``; their permutation has constants that are worked out once."""
    return parts_of(num_units, world, permutation)
