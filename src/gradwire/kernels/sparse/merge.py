"""Entries of all ranks added up over one part.

Source: ZEN (OSDI 2025), section 2.2: incremental aggregation at the server of a part.
Differences: lists ascend, so all are gone through once, side by side, and neither a
    table nor a sum for each place is needed. A place's sum starts at zero, as a dense
    sum's does, and adds the ranks' values in rank order: so it has the same bits
    whichever rank sends first.
Legend: K entries.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import InvalidSetting, invalid
from ..libraries import loader
from .entries import Entries, check_entries, check_range, first_wrong

_load_merge = loader("merge")

_NO_MEMORY = -2
_FIRST_WRONG = -3


def merge(
    ranks: Sequence[Entries],
    num_places: int,
    *,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    room: tuple[Tensor, Tensor] | None = None,
) -> Entries:
    """``scale`` times each place's values, added up over all ranks that have it.

    ``ranks`` (one at least, of one width) hold ascending places below ``num_places``.
    Values are scaled and added in ``dtype``, by default their own. The result lies in
    ``room``, places (int32) and values (``dtype``), each as long as the entries of all
    ranks; without it new tensors are made. Raises InvalidSetting where a place is out
    of range or descends.

    >>> one = Entries(torch.tensor([1, 3], dtype=torch.int32), torch.tensor([2.0, 1.0]))
    >>> two = Entries(torch.tensor([3], dtype=torch.int32), torch.tensor([5.0]))
    >>> merge([one, two], 4).values
    tensor([2., 6.])
    """
    width = ranks[0].width
    for entries in ranks:
        check_entries(entries)
        if entries.width != width:
            raise invalid(
                "width", entries.width, f"{width}", "use one width everywhere"
            )
    dtype = dtype or ranks[0].values.dtype
    most = sum(entries.num for entries in ranks)
    if room is None:
        like = ranks[0]
        values = like.values.new_empty(most * width, dtype=dtype)
        room = like.indices_K.new_empty(most), values
    places_K, values = room
    if min(places_K.numel(), values.numel() // width) < most or values.dtype != dtype:
        raise invalid(
            "room",
            f"{places_K.numel()} places, {values.numel()} values of {values.dtype}",
            f"{most} places and units of {width} {dtype}",
            "make it for the entries of all ranks",
        )
    library = _load_merge(values, *(entries.values for entries in ranks))
    if library is None:
        return _reference(ranks, num_places, scale, dtype)
    number = len(ranks)
    count = library.gw_merge(
        (ctypes.c_void_p * number)(
            *[entries.indices_K.data_ptr() for entries in ranks]
        ),
        (ctypes.c_void_p * number)(*[entries.values.data_ptr() for entries in ranks]),
        (ctypes.c_int64 * number)(*[entries.num for entries in ranks]),
        number,
        num_places,
        width,
        scale,
        places_K,
        values,
    )
    if count == _NO_MEMORY:
        raise MemoryError(f"sums of {most} entries: no memory for a window of them")
    if count <= _FIRST_WRONG:
        raise _wrong(ranks[_FIRST_WRONG - count], num_places)
    return Entries(places_K[:count], values[: count * width], width)


def merge_unordered(
    ranks: Sequence[Entries], num_places: int, *, scale: float, dtype: torch.dtype
) -> Entries:
    """``merge`` of places in any order, through a dense vector of all places.

    Without a place twice in one list, the sums have the bits of ``merge``.
    """
    width = ranks[0].width
    sums = ranks[0].values.new_zeros(num_places * width, dtype=dtype)
    taken_N = torch.zeros(num_places, dtype=torch.bool, device=sums.device)
    # torch adds single elements faster than rows of one element
    shape = (-1,) if width == 1 else (-1, width)
    for entries in ranks:
        check_range(entries, num_places)
        at_K = entries.indices_K.long()
        taken_N[at_K] = True
        units = entries.values.view(shape).to(dtype) * scale
        sums.view(shape).index_add_(0, at_K, units)
    places_K = taken_N.nonzero().squeeze(1)
    return Entries(places_K.int(), sums.view(-1, width)[places_K].view(-1), width)


def _reference(
    ranks: Sequence[Entries], num_places: int, scale: float, dtype: torch.dtype
) -> Entries:
    """The merge by its definition."""
    for entries in ranks:
        if first_wrong(entries.indices_K, num_places) >= 0:
            raise _wrong(entries, num_places)
    return merge_unordered(ranks, num_places, scale=scale, dtype=dtype)


def _wrong(entries: Entries, num_places: int) -> InvalidSetting:
    bad = first_wrong(entries.indices_K, num_places)
    return InvalidSetting(
        f"place {bad} must lie in [0, {num_places}), not below the one before it, got "
        f"{int(entries.indices_K[bad])}; give every rank the same vector, world "
        "and permutation"
    )
