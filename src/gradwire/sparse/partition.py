"""Entries grouped by the part they belong to: none is lost, and their order follows from the list.

Source: ZEN (OSDI 2025), section 3.2; what algorithm 1 is for.
Differences: no hash table, so no collision, no rehash and no serial memory. Two passes over the
    entries: count those of each part, then write each where the counts say. An index may occur more
    than once.

Within a part entries come window by window, a window being 2^s adjacent places, and in a window as
they came: whoever adds them up then sweeps over its sums once a rank, instead of jumping. The
result does not depend on the number of threads. On a GPU (``gpu.partition.two_passes``) a part has
no windows: its entries come as they came.

Legend: K entries, W parts.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..errors import invalid
from ..kernels._build import load_library
from ..kernels._operands import address
from ..payload import Payload, slot_bytes
from .entries import Entries, check_entries
from .formats._bits import NO_MEMORY
from .formats.coo import coo
from .gpu import partition as gpu
from .parts import Parts, out_of_range, part_length
from .permutation import Permutation

_LEAST_SHIFT = 14  # a window's sums take 64 KiB
_MOST_WINDOWS = 1024  # of all parts: as many streams are written at a time


def window_shift(length: int, world: int) -> int:
    """s: windows of 2^s places cut parts of ``length`` places, so that there are not too many."""
    windows = max(1, _MOST_WINDOWS // world)
    return max(_LEAST_SHIFT, (-(-length // windows) - 1).bit_length())


def partition(
    entries: Entries,
    num_units: int,
    world: int,
    permutation: Permutation | None = None,
    *,
    places_K: Tensor | None = None,
    values: Tensor | None = None,
) -> Parts:
    """Groups entries of a vector of ``num_units`` units into ``world`` parts (``parts.Part``).

    ``places_K`` (int32) and ``values`` are what the result lies in, of the entries' own lengths and
    dtypes; without them new ones are made. Raises InvalidSetting where an index is not in
    [0, num_units).
    """
    _check(entries, num_units, world, permutation)
    out = Entries(
        torch.empty_like(entries.indices_K) if places_K is None else places_K,
        torch.empty_like(entries.values) if values is None else values,
        entries.width,
    )
    check_entries(out)
    if out.num != entries.num or out.values.dtype != entries.values.dtype:
        given = f"{out.num} of {out.values.dtype}"
        accepted = f"room for {entries.num} of {entries.values.dtype}"
        raise invalid("places_K and values", given, accepted, "make them for these entries")
    library = _library(entries, out.values)
    if library is not None:
        arguments = (address(out.indices_K), address(out.values))
        return Parts(_run(library, entries, num_units, world, permutation, *arguments), out)
    grouped = _grouped(entries, num_units, world, permutation)
    out.indices_K.copy_(grouped.entries.indices_K)
    out.values.copy_(grouped.entries.values)
    return Parts(grouped.counts_W, out)


def partition_into_coo(
    entries: Entries,
    num_units: int,
    world: int,
    permutation: Permutation | None = None,
    *,
    buffer: Tensor | None = None,
) -> list[Payload]:
    """As ``partition``, written as what is sent: one ``coo`` payload for each part.

    They lie in ``buffer`` (uint8, at least ``coo_slots_bytes`` long) one behind the other, each in
    a slot of ``payload.slot_bytes``. Without one a new buffer is made.
    """
    _check(entries, num_units, world, permutation)
    needed = coo_slots_bytes(entries, world)
    if buffer is None:
        buffer = torch.empty(needed, dtype=torch.uint8, device=entries.values.device)
    if buffer.dtype != torch.uint8 or buffer.numel() < needed:
        given = f"{buffer.numel()} of {buffer.dtype}"
        raise invalid("buffer", given, f"{needed} uint8", "ask coo_slots_bytes")
    library = _library(entries, buffer)
    if library is not None:
        counts_W = _run(library, entries, num_units, world, permutation, None, address(buffer))
        return _slots(counts_W, entries, num_units, buffer)
    grouped = _grouped(entries, num_units, world, permutation)
    payloads = _slots(grouped.counts_W, entries, num_units, buffer)
    for rank, payload in enumerate(payloads):
        coo().encode(grouped.of(rank), num_units, payload.buffer)
    return payloads


def coo_slots_bytes(entries: Entries, world: int) -> int:
    """The most bytes that ``partition_into_coo`` writes, however entries fall into parts.

    Of one part all together, and for each part what rounds a slot and aligns its values.
    """
    size_bytes = entries.num * 4 + entries.values.numel() * entries.values.element_size()
    return slot_bytes(size_bytes) + world * 16


def _check(entries: Entries, num_units: int, world: int, permutation: Permutation | None) -> None:
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


def _slots(
    counts_W: tuple[int, ...], entries: Entries, num_units: int, buffer: Tensor
) -> list[Payload]:
    """Views of the payloads that lie one behind the other."""
    payloads, start = [], 0
    for count in counts_W:
        form = coo().layout(count, num_units, entries.width, entries.values.dtype)
        payloads.append(Payload(form, buffer[start : start + form.size_bytes]))
        start += form.slot_bytes
    return payloads


def _library(entries: Entries, *outputs: Tensor) -> ctypes.CDLL | None:
    """The C++ where it can serve: it moves whole units, of whatever dtype, in the CPU's memory."""
    tensors = (*entries[:2], *outputs)
    on_cpu = all(one.device.type == "cpu" and one.is_contiguous() for one in tensors)
    return load_library("partition") if on_cpu else None


def _run(
    library: ctypes.CDLL,
    entries: Entries,
    num_units: int,
    world: int,
    permutation: Permutation | None,
    places: ctypes.c_void_p | None,
    values: ctypes.c_void_p,
) -> tuple[int, ...]:
    item_bytes = entries.values.element_size()
    length = max(1, part_length(num_units, world))
    counts_W = (ctypes.c_int64 * world)()
    library.gw_partition.restype = ctypes.c_int64
    bad = library.gw_partition(
        address(entries.indices_K),
        address(entries.values),
        ctypes.c_int64(entries.num),
        ctypes.c_int64(item_bytes * entries.width),
        ctypes.c_int64(item_bytes),
        ctypes.c_int64(num_units),
        ctypes.c_int64(length),
        window_shift(length, world),
        ctypes.c_int64(world),
        None if permutation is None else permutation.constants,
        places,
        values,
        counts_W,
        torch.get_num_threads(),
    )
    if bad == NO_MEMORY:
        raise MemoryError(f"partition of {entries.num} entries: no memory for their places")
    if bad >= 0:
        raise out_of_range(bad, int(entries.indices_K[bad]), num_units)
    return tuple(counts_W)


def _grouped(
    entries: Entries, num_units: int, world: int, permutation: Permutation | None
) -> Parts:
    """What the C++ does not serve: in Triton on a GPU, else by the definition."""
    on_gpu = entries.indices_K.device.type == "cuda" and gpu.available()
    way = gpu.two_passes if on_gpu else _reference
    return way(entries, num_units, world, permutation)


def _reference(
    entries: Entries, num_units: int, world: int, permutation: Permutation | None
) -> Parts:
    """The definition: a stable sort by part and window."""
    indices_K, values, width = entries
    bad = ((indices_K < 0) | (indices_K >= num_units)).nonzero()
    if bad.numel():
        raise out_of_range(int(bad[0]), int(indices_K[bad[0]]), num_units)
    places_K = indices_K if permutation is None else permutation.places(indices_K)
    length = max(1, part_length(num_units, world))
    part_K = places_K // length
    local_K = places_K - part_K * length
    window_K = part_K * length + (local_K >> window_shift(length, world))
    order_K = window_K.argsort(stable=True)
    local_K = local_K[order_K]
    counts_W = part_K.bincount(minlength=world).tolist()
    moved = values.view(-1, width)[order_K].reshape(-1)
    return Parts(tuple(counts_W), Entries(local_K, moved, width))
