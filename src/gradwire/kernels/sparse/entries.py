"""Entries: a sparse vector as indices and values, and the entries of a dense vector.

Legend: N elements, K entries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...contract.bounds import check_whole
from ...errors import invalid

MOST_WIDTH = 2**24
"""The most elements of a unit. A short last unit is filled up with zeros to the width, which so
takes 64 MiB of float32 at most."""


class Entries(NamedTuple):
    """Units of a sparse vector: unit ``indices_K[i]`` is ``values[i * width : (i + 1) * width]``.

    Each function that takes or gives entries says what their indices are: indices of the whole
    vector, or local places of a part.
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
        raise invalid("width", width, "at least 1", "give the number of elements in a unit")
    if indices_K.dtype != torch.int32 or indices_K.dim() != 1 or not indices_K.is_contiguous():
        given = f"{tuple(indices_K.shape)} {indices_K.dtype}"
        raise invalid("indices_K", given, "a contiguous int32 vector", "convert it with .int()")
    if values.numel() != indices_K.numel() * width or not values.is_contiguous():
        raise invalid(
            "values",
            f"{values.numel()} elements",
            f"{indices_K.numel()} units of {width} elements, contiguous",
            "give each index its unit",
        )
    if not values.dtype.is_floating_point:
        raise invalid("values", values.dtype, "of a floating dtype", "convert them with .float()")


def check_width(what: str, given: object) -> None:
    """Refuses ``given`` unless it is a unit's number of elements: 1 to ``MOST_WIDTH``."""
    check_whole(what, given, "give the length of a row", most=MOST_WIDTH)


def num_units(numel: int, width: int) -> int:
    """The number of units of ``numel`` elements; the last unit may be short.

    >>> num_units(10, 4)
    3
    """
    return -(-numel // width)


def nonzero(dense_N: Tensor, width: int = 1) -> Entries:
    """The units of a dense vector that have a non-zero element, by ascending index.

    NaN counts as non-zero. A negative zero counts as zero, as masked gradients are full of them. A
    short last unit is filled up with zeros. The tensors are new, as K is not known beforehand.
    """
    units_Kw = _as_units(dense_N, width)
    kept_K = units_Kw.ne(0).any(1).nonzero().squeeze(1)
    return Entries(kept_K.int(), units_Kw[kept_K].reshape(-1), width)


def drop_unset(entries: Entries) -> Entries:
    """The entries whose values have any bit set, as zeros that fill up a block have none.

    A negative zero has a bit set, so it is kept.
    """
    units_Kw = entries.values.view(-1, entries.width)
    bits_Kw = units_Kw.view(_BITS[entries.values.element_size()])
    kept_K = bits_Kw.ne(0).any(1).nonzero().squeeze(1)
    return Entries(entries.indices_K[kept_K], units_Kw[kept_K].reshape(-1), entries.width)


_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def _as_units(dense_N: Tensor, width: int) -> Tensor:
    missing = num_units(dense_N.numel(), width) * width - dense_N.numel()
    filled = torch.cat([dense_N, dense_N.new_zeros(missing)]) if missing else dense_N
    return filled.reshape(-1, width)
