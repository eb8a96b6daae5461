"""Entries: a sparse vector as indices and values, and the entries of a dense vector.

Legend: N elements, K entries."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...contract.bounds import check_whole
from ...errors import InvalidSetting, invalid
from ..libraries import BITS, first_outside
from .permutation import Permutation

# ---- entries -------------------------------------------------------------------------


MOST_WIDTH = 2**24
"""The most elements of a unit. A short last unit is filled up with zeros to the width,
which so takes 64 MiB of float32 at most.
"""


class Entries(NamedTuple):
    """Units of a sparse vector: unit ``indices_K[i]`` is
    ``values[i * width : (i + 1) * width]``.

    Each function that takes or gives entries says what their indices are: indices of
    the whole vector, or local places of a part.
    """

    indices_K: Tensor
    """The index of each entry, int32."""
    values: Tensor
    """The K * width elements of all units, of any floating dtype, contiguous."""
    width: int = 1

    @property
    def num(self) -> int:
        """The number of entries, K."""
        return self.indices_K.numel()


def check_entries(entries: Entries) -> None:
    """Raises InvalidSetting unless indices and values belong together."""
    indices_K, values, width = entries
    if width < 1:
        raise invalid(
            "width", width, "at least 1", "give the number of elements in a unit"
        )
    if (
        indices_K.dtype != torch.int32
        or indices_K.dim() != 1
        or not indices_K.is_contiguous()
    ):
        raise invalid(
            "indices_K",
            f"{tuple(indices_K.shape)} {indices_K.dtype}",
            "a contiguous int32 vector",
            "convert it with .int()",
        )
    if values.numel() != indices_K.numel() * width or not values.is_contiguous():
        raise invalid(
            "values",
            f"{values.numel()} elements",
            f"{indices_K.numel()} units of {width} elements, contiguous",
            "give each index its unit",
        )
    if not values.dtype.is_floating_point:
        raise invalid(
            "values", values.dtype, "of a floating dtype", "convert them with .float()"
        )


def check_width(what: str, value: object) -> None:
    """Refuses ``value`` unless it is a unit's size: 1 to ``MOST_WIDTH``."""
    check_whole(what, value, "give the length of a row", most=MOST_WIDTH)


def num_units(numel: int, width: int) -> int:
    """The number of units of ``numel`` elements; the last unit may be short.

    >>> num_units(10, 4)
    3
    """
    return -(-numel // width)


def drop_unset(entries: Entries) -> Entries:
    """The entries with any bit set in their values; zeros that fill a block have none.

    A negative zero has a bit set, so it is kept.
    """
    units_Kw = entries.values.view(-1, entries.width)
    bits_Kw = units_Kw.view(BITS[entries.values.element_size()])
    kept_K = bits_Kw.ne(0).any(1).nonzero().squeeze(1)
    return Entries(
        entries.indices_K[kept_K], units_Kw[kept_K].reshape(-1), entries.width
    )


def as_units(dense_N: Tensor, width: int) -> Tensor:
    """The units of a vector as rows; a short last one is filled up with zeros."""
    missing = num_units(dense_N.numel(), width) * width - dense_N.numel()
    filled = torch.cat([dense_N, dense_N.new_zeros(missing)]) if missing else dense_N
    return filled.reshape(-1, width)


def first_wrong(places_K: Tensor, num_places: int, *, strictly: bool = False) -> int:
    """The position of the first place that does not ascend or is out of range, or -1.

    Places may be equal unless they are to ascend ``strictly``.
    """
    step = int(strictly)
    if not places_K.numel():
        return -1
    before_K = torch.cat([places_K.new_full((1,), -step), places_K[:-1]])
    descends_K = places_K < before_K + step
    wrong = (descends_K | (places_K >= num_places)).nonzero()
    return int(wrong[0]) if wrong.numel() else -1


# ---- Parts ---------------------------------------------------------------------------
#
# The range of places that each rank serves, and the way from a place back to its index.


def part_length(num_units: int, world: int) -> int:
    """L = ceil(num_units / world), the places of a part.

    The last parts may have fewer.
    """
    return -(-num_units // world)


@dataclass(frozen=True)
class Part:
    """The places ``rank`` of ``world`` serves: [rank L, min((rank + 1) L, num_units)).

    Without a permutation a place is the index itself, and a part is a range of the
    vector.

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
            raise invalid(
                "rank", self.rank, f"in [0, {self.world})", "number ranks from 0"
            )
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
        return (
            places_K if self.permutation is None else self.permutation.indices(places_K)
        )


def parts_of(
    num_units: int, world: int, permutation: Permutation | None
) -> tuple[Part, ...]:
    """The parts of all ranks."""
    return tuple(Part(num_units, world, rank, permutation) for rank in range(world))


class Parts(NamedTuple):
    """Entries of part 0, then entries of part 1, and so on."""

    counts_W: tuple[int, ...]
    """The number of entries of each part."""
    entries: Entries
    """The entries of all parts, whose indices are local places."""

    def of(self, rank: int) -> Entries:
        """Views of one part's entries."""
        start = sum(self.counts_W[:rank])
        stop = start + self.counts_W[rank]
        (places_K, values, width) = self.entries
        return Entries(
            places_K[start:stop], values[start * width : stop * width], width
        )


def out_of_range(position: int, index: int, num_units: int) -> InvalidSetting:
    """The error for an index outside its vector."""
    return InvalidSetting(
        f"index {position} must lie in [0, {num_units}), got {index}; "
        "the entries were made for a vector of another length"
    )


def check_range(entries: Entries, num_units: int) -> None:
    """Raises InvalidSetting where an index is not in [0, ``num_units``)."""
    bad = first_outside(entries.indices_K, num_units)
    if bad >= 0:
        raise out_of_range(bad, int(entries.indices_K[bad]), num_units)
