"""Parts: the range of places that each rank serves, and the way from a place back to its index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InvalidSetting, invalid
from .entries import Entries
from .permutation import Permutation


def part_length(num_units: int, world: int) -> int:
    """L = ceil(num_units / world), the places of a part; the last parts may have fewer."""
    return -(-num_units // world)


@dataclass(frozen=True)
class Part:
    """The places that ``rank`` of ``world`` serves: [rank L, min((rank + 1) L, num_units)).

    Without a permutation a place is the index itself, and a part is a range of the vector.

    >>> [Part(10, 4, rank).length for rank in range(4)]
    [3, 3, 3, 1]
    """

    num_units: int
    """The number of units of the whole vector."""
    world: int = 1
    rank: int = 0
    permutation: Permutation | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise invalid("rank", self.rank, f"in [0, {self.world})", "number ranks from 0")
        if self.permutation is not None and self.permutation.numel != self.num_units:
            raise invalid(
                "permutation",
                f"of {self.permutation.numel}",
                f"one of {self.num_units} units",
                "make it for the vector's number of units",
            )

    @property
    def first(self) -> int:
        """The first place of the part."""
        return min(self.rank * part_length(self.num_units, self.world), self.num_units)

    @property
    def length(self) -> int:
        """The number of places; it may be 0 for the last ranks."""
        return min(part_length(self.num_units, self.world), self.num_units - self.first)

    def indices(self, local_K: Tensor) -> Tensor:
        """The indices of local places; indices and places are int32."""
        places_K = (local_K + self.first).to(torch.int32)
        return places_K if self.permutation is None else self.permutation.indices(places_K)


def parts_of(num_units: int, world: int, permutation: Permutation | None) -> tuple[Part, ...]:
    """The parts of all ranks."""
    return tuple(Part(num_units, world, rank, permutation) for rank in range(world))


class Parts(NamedTuple):
    """Entries of part 0, then those of part 1, and so on."""

    counts_W: tuple[int, ...]
    """The number of entries of each part."""
    entries: Entries
    """The entries of all parts, whose indices are local places."""

    def of(self, rank: int) -> Entries:
        """Views of one part's entries."""
        start = sum(self.counts_W[:rank])
        stop, (places_K, values, width) = start + self.counts_W[rank], self.entries
        return Entries(places_K[start:stop], values[start * width : stop * width], width)


def out_of_range(position: int, given: int, num_units: int) -> InvalidSetting:
    """The error for an index outside its vector."""
    return InvalidSetting(
        f"index {position} must lie in [0, {num_units}), got {given}; "
        "the entries were made for a vector of another length"
    )
