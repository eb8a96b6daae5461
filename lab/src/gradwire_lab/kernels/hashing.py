"""Entries grouped by part through a hash table: ZEN's algorithm 1.

Source: ZEN (OSDI 2025), section 3.2, algorithm 1 with its four techniques.
Differences: h0 is the part of an index's place under the permutation. All ranks share
    it, as technique 3 asks, parts are equally large, and no rank stores index sets.
    Cells are claimed by compare-and-swap: under the paper's read-after-write a thread
    that has seen a free cell may write after another has read its own entry back, which
    is then lost. A cell holds the entry's number and -1 marks an empty one: 0 is a
    number. Where a part's serial memory is full, entries go to a list of their own and
    are put into their parts afterwards: ``Hashed.fallback`` counts them. r1 and r2 are
    the cells of all parts together.

``partition`` needs no table, and its parts ascend. It has the same entries in each
part, in half the time or less on a CPU. Legend: K entries, W parts.
"""

import ctypes
import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.libraries import has_triton, loader
from gradwire.kernels.sparse.bits import NO_MEMORY
from gradwire.kernels.sparse.entries import (
    Entries,
    Parts,
    check_range,
    out_of_range,
    part_length,
)
from gradwire.kernels.sparse.partition import check_partition, partition, room_for
from gradwire.kernels.sparse.permutation import Permutation, places_on_gpu

from . import SOURCES

_log = logging.getLogger("gradwire")
_load_hashing = loader("hashing", SOURCES)

_PROGRAM = 1024
"""Entries of a program on a GPU."""


@dataclass(frozen=True)
class HashMemory:
    """The memory of algorithm 1, in its own letters; the defaults are the paper's."""

    rehashes: int = 3
    """The number of hash functions into parallel memory, k."""
    parallel: float = 2.0
    """Cells of parallel memory for each entry, all parts together: r1 / (|G| d_G)."""
    serial: float = 0.1
    """Cells of serial memory for each cell of parallel memory: r2 / r1."""

    def parallel_cells(self, num_entries: int, world: int) -> int:
        """The cells of a part's parallel memory, one at least.

        >>> HashMemory().parallel_cells(1000, 4)
        500
        """
        return max(1, -(-round(self.parallel * num_entries) // world))

    def serial_cells(self, num_entries: int, world: int) -> int:
        """The cells of a part's serial memory."""
        cells = self.parallel_cells(num_entries, world)
        return -(-round(self.serial * cells * world) // world)


class Hashed(NamedTuple):
    """The result of algorithm 1."""

    parts: Parts
    """The entries of each part, in any order."""
    serial: int
    """The number of entries in serial memory."""
    fallback: int
    """The number of entries for which serial memory was full too."""


def grouped(
    entries: Entries,
    num_units: int,
    world: int,
    permutation: Permutation | None,
    room: Entries,
) -> Parts:
    """The parts of ``zen(partition="hash")``; a warning says where memory was full."""
    hashed = hash_partition(entries, num_units, world, permutation, room=room)
    if hashed.fallback:
        _warn_of_full_memory(num_units, hashed.fallback, entries.num)
    return hashed.parts


@lru_cache
def _warn_of_full_memory(num_units: int, fallback: int, num: int) -> None:
    """Says so, for each length of a gradient."""
    _log.warning(
        "zen: serial memory was full for %d of %d elements of %d; they were put into "
        'their parts one by one, and none is lost; partition="permutation" needs no '
        "such memory",
        fallback,
        num,
        num_units,
    )


def hash_partition(
    entries: Entries,
    num_units: int,
    world: int,
    permutation: Permutation | None = None,
    *,
    memory: HashMemory = HashMemory(),
    room: Entries | None = None,
) -> Hashed:
    """Groups a vector's entries, of ``num_units`` units, into ``world`` parts.

    On a CPU the result lies in ``room``, which has the entries' lengths and dtypes;
    without it new tensors are made. Without a compiler, ``partition`` serves. Raises
    InvalidSetting where an index is not in [0, num_units).
    """
    check_partition(entries, num_units, world, permutation)
    if entries.indices_K.is_cuda and has_triton():
        return hash_on_gpu(entries, num_units, world, permutation, memory)
    out = room_for(entries, room)
    on_cpu = all(
        tensor.is_cpu and tensor.is_contiguous() for tensor in (*entries[:2], out[1])
    )
    library = _load_hashing() if on_cpu else None
    if library is None:
        parts = partition(entries, num_units, world, permutation, room=out)
        return Hashed(parts, 0, 0)
    counts_W = (ctypes.c_int64 * world)()
    spill = (ctypes.c_int64 * 2)()
    bad = library.gw_hash(
        entries.indices_K,
        entries.values,
        entries.num,
        entries.values.element_size() * entries.width,
        num_units,
        max(1, part_length(num_units, world)),
        world,
        None if permutation is None else permutation.constants,
        memory.rehashes,
        memory.parallel_cells(entries.num, world),
        memory.serial_cells(entries.num, world),
        out.indices_K,
        out.values,
        counts_W,
        spill,
    )
    if bad == NO_MEMORY:
        raise MemoryError(f"no memory for a hash table of {entries.num} entries")
    if bad >= 0:
        raise out_of_range(bad, int(entries.indices_K[bad]), num_units)
    return Hashed(Parts(tuple(counts_W), out), *spill)


def hash_on_gpu(
    entries: Entries,
    num_units: int,
    world: int,
    permutation: Permutation | None,
    memory: HashMemory,
) -> Hashed:
    """``hash_partition`` by Triton."""
    from .hashing_device import hash_entries

    check_range(entries, num_units)
    length = max(1, part_length(num_units, world))
    places_K = entries.indices_K
    if permutation is not None:
        places_K = torch.empty_like(places_K)
        places_on_gpu(entries.indices_K, permutation, places_K)
    parallel = memory.parallel_cells(entries.num, world)
    serial = memory.serial_cells(entries.num, world)
    last = world * (parallel + serial)
    table = places_K.new_full((last + 1,), -1)
    counters = places_K.new_zeros(world + 1)
    spilled_K = torch.empty_like(places_K)
    hash_entries[(max(1, -(-entries.num // _PROGRAM)),)](
        entries.indices_K,
        places_K,
        table,
        counters,
        spilled_K,
        entries.num,
        length,
        parallel,
        serial,
        last,
        REHASHES=memory.rehashes,
        BLOCK=_PROGRAM,
    )
    cells = table[:last]
    *taken_W, fallback = counters.tolist()
    order_K = _in_parts(cells[cells >= 0], spilled_K[:fallback], places_K // length)
    placed_K = places_K[order_K.long()]
    counts_W = (placed_K // length).bincount(minlength=world)
    units = entries.values.view(-1, entries.width)[order_K.long()].reshape(-1)
    grouped = Entries(placed_K % length, units, entries.width)
    in_serial = sum(min(taken, serial) for taken in taken_W)
    return Hashed(Parts(tuple(counts_W.tolist()), grouped), in_serial, fallback)


def _in_parts(order_K: Tensor, spilled_K: Tensor, part_K: Tensor) -> Tensor:
    """The numbers of all entries by part: of the table, which are, and of the spill."""
    if not spilled_K.numel():
        return order_K
    order_K = torch.cat([order_K, spilled_K])
    return order_K[part_K[order_K.long()].argsort(stable=True)]
