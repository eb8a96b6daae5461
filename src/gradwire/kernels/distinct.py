"""How many places several lists of indices name in all: the size of their union.

Legend: K indices of one list. Lists that ascend without duplicates, as the indices of a
sparse
payload do, are read once: for a short range of places at a time a bit a place is kept,
in the nearest cache. Others are sorted first, by torch.
"""

import ctypes
from collections.abc import Sequence

import torch

from ..errors import InvalidSetting
from .libraries import INT32_MAX, check_vector, loader

_load_distinct = loader("distinct")


def count_distinct(lists: Sequence[torch.Tensor], num_places: int) -> int:
    """The number of places in [0, ``num_places``) in at least one of ``lists`` (int32).

    Raises InvalidSetting where an index leaves that range.

    >>> count_distinct([torch.tensor([0, 2]).int(), torch.tensor([2, 3, 5]).int()], 6)
    4
    """
    for indices_K in lists:
        check_vector("indices_K", indices_K, indices_K.numel(), torch.int32)
    on_host = all(indices_K.device.type == "cpu" for indices_K in lists)
    library = _load_distinct() if on_host and num_places <= INT32_MAX else None
    if library is None:
        return _reference(lists, num_places)
    count = library.gw_count_distinct(
        (ctypes.c_void_p * len(lists))(*(indices_K.data_ptr() for indices_K in lists)),
        (ctypes.c_int64 * len(lists))(*(indices_K.numel() for indices_K in lists)),
        len(lists),
        num_places,
    )
    return int(count) if count >= 0 else _reference(lists, num_places)


def _reference(lists: Sequence[torch.Tensor], num_places: int) -> int:
    if not lists:
        return 0
    places = torch.cat([*lists]).unique()  # type: ignore[no-untyped-call]
    if not places.numel():
        return 0
    first = int(places[0])
    last = int(places[-1])
    if first < 0 or last >= num_places:
        raise InvalidSetting(
            f"indices must lie in [0, {num_places}), got {first} to {last}; "
            "they were made for a vector of another length"
        )
    return int(places.numel())
