"""Entries grouped by the part they belong to, by ascending place: none is lost.

Source: ZEN (OSDI 2025), section 3.2; it serves the purpose of algorithm 1.
Differences: no hash table, so no collision, no rehash and no serial memory, but a radix
    sort by place. An index may occur more than once; entries of one place stay in their
    order.

Formats and the merge need ascending places. The result does not depend on the number of
threads. On a GPU the definition serves: a stable sort by place.

Legend: K entries, W parts.
"""

import ctypes

import torch

from ...errors import invalid
from ..libraries import loader
from .bits import NO_MEMORY
from .entries import (
    Entries,
    Parts,
    check_entries,
    check_range,
    out_of_range,
    part_length,
)
from .permutation import Permutation

_load_partition = loader("partition")


def partition(
    entries: Entries,
    num_units: int,
    world: int,
    permutation: Permutation | None = None,
    *,
    room: Entries | None = None,
) -> Parts:
    """Groups a vector's entries, of ``num_units`` units, into ``world`` parts.

    The result lies in ``room``, which has the lengths and dtypes of the entries;
    without it new tensors are made. Raises InvalidSetting where an index is not in
    [0, num_units).
    """
    check_partition(entries, num_units, world, permutation)
    out = room_for(entries, room)
    tensors = (*entries[:2], out.values)  # units of any dtype are moved
    on_cpu = all(
        tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors
    )
    library = _load_partition() if on_cpu else None
    if library is None:
        grouped = _reference(entries, num_units, world, permutation)
        out.indices_K.copy_(grouped.entries.indices_K)
        out.values.copy_(grouped.entries.values)
        return Parts(grouped.counts_W, out)
    counts_W = (ctypes.c_int64 * world)()
    bad = library.gw_partition(
        entries.indices_K,
        entries.values,
        entries.num,
        entries.values.element_size() * entries.width,
        num_units,
        part_length(num_units, world),
        world,
        None if permutation is None else permutation.constants,
        out.indices_K,
        out.values,
        counts_W,
    )
    if bad == NO_MEMORY:
        raise MemoryError(
            f"partition of {entries.num} entries: no memory for their places"
        )
    if bad >= 0:
        raise out_of_range(bad, int(entries.indices_K[bad]), num_units)
    return Parts(tuple(counts_W), out)


def room_for(entries: Entries, room: Entries | None) -> Entries:
    """``room`` if it suits entries that are moved; without it new tensors."""
    if room is None:
        return Entries(
            torch.empty_like(entries.indices_K),
            torch.empty_like(entries.values),
            entries.width,
        )
    check_entries(room)
    if room.num != entries.num or room.values.dtype != entries.values.dtype:
        raise invalid(
            "room",
            f"{room.num} of {room.values.dtype}",
            f"room for {entries.num} of {entries.values.dtype}",
            "make it for these entries",
        )
    return room


def check_partition(
    entries: Entries, num_units: int, world: int, permutation: Permutation | None
) -> None:
    """Raises InvalidSetting unless these entries can be cut into parts."""
    check_entries(entries)
    if world < 1:
        raise invalid("world", world, "at least 1", "give the number of ranks")
    if permutation is not None and permutation.numel != num_units:
        raise invalid(
            "permutation",
            f"of {permutation.numel}",
            f"one of {num_units} units",
            "make it for the vector's number of units",
        )


def _reference(
    entries: Entries, num_units: int, world: int, permutation: Permutation | None
) -> Parts:
    """The definition of a partition: a stable sort by place."""
    check_range(entries, num_units)
    indices_K, values, width = entries
    places_K = indices_K if permutation is None else permutation.places(indices_K)
    length = max(1, part_length(num_units, world))
    counts_W = (places_K // length).bincount(minlength=world).tolist()
    order_K = places_K.argsort(stable=True)
    units = values.view(-1, width)[order_K].reshape(-1)
    return Parts(tuple(counts_W), Entries((places_K % length)[order_K], units, width))
