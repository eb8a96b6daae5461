"""A sparse vector in coordinates, and those of a dense one.

Legend: N elements, K entries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..bounds import check_whole
from ..errors import invalid

MOST_WIDTH = 2**24
"""Elements of a unit: a short last one is filled up to this with zeros, 64 MiB of float32."""


class Entries(NamedTuple):
    """Units of a sparse vector: unit ``indices_K[i]`` is ``values[i * width : (i + 1) * width]``.

    What the indices count (indices of the whole vector, or local places of a part) is said by
    whoever takes or gives entries.
    """

    indices_K: Tensor
    """int32."""
    values: Tensor
    """K * width elements, of any floating dtype, contiguous."""
    width: int = 1

    @property
    def num(self) -> int:
        """K."""
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
    """Refuses what is no number of elements in a unit: a row's length, say."""
    check_whole(what, given, "give the length of a row", most=MOST_WIDTH)


def num_units(numel: int, width: int) -> int:
    """How many units ``numel`` elements have; the last may be short.

    >>> num_units(10, 4)
    3
    """
    return -(-numel // width)


def nonzero(dense_N: Tensor, width: int = 1) -> Entries:
    """The units of a dense vector of which an element is not zero, by ascending index.

    NaN is not zero; a negative zero is, as masked gradients are full of them. A short last unit is
    filled up with zeros. New tensors: K is not known beforehand.
    """
    units_Kw = _as_units(dense_N, width)
    kept_K = units_Kw.ne(0).any(1).nonzero().squeeze(1)
    return Entries(kept_K.int(), units_Kw[kept_K].reshape(-1), width)


def drop_unset(entries: Entries) -> Entries:
    """Those entries of which a bit is set: what zeros that fill a block or a vector lack."""
    units_Kw = entries.values.view(-1, entries.width)
    bits_Kw = units_Kw.view(_BITS[entries.values.element_size()])
    kept_K = bits_Kw.ne(0).any(1).nonzero().squeeze(1)
    return Entries(entries.indices_K[kept_K], units_Kw[kept_K].reshape(-1), entries.width)


_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def _as_units(dense_N: Tensor, width: int) -> Tensor:
    missing = num_units(dense_N.numel(), width) * width - dense_N.numel()
    filled = torch.cat([dense_N, dense_N.new_zeros(missing)]) if missing else dense_N
    return filled.reshape(-1, width)
