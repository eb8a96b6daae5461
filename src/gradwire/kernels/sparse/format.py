"""SparseFormat: a sparse payload's layout and size, and how to write and read it.

Legend: N elements, K entries.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ...contract.payload import Format, Payload
from .entries import Entries, Part, check_entries
from .scatter import scatter_entries


class SparseFormat(ABC):
    """A layout of a part's entries; a whole vector is the only part among one rank.

    Concrete formats are frozen keyword-only dataclasses. ``count`` below is the number
    of entries, but that of blocks for ``blocks``. ``num_units`` is the number of units
    that the format tells apart: the part's length, but the whole vector's units for
    ``bitmap`` where the part is permuted.
    """

    @abstractmethod
    def layout(
        self,
        count: int,
        num_units: int,
        width: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> Format:
        """The fields of a payload; ranks must agree on ``count`` before it travels."""

    def size_bytes(
        self,
        count: int,
        num_units: int,
        width: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> int:
        """Bytes on the wire, as the file's Wire line says."""
        return self.layout(count, num_units, width, dtype).size_bytes

    def count(self, entries: Entries, num_units: int) -> int:
        """The ``count`` that ``layout`` needs for these entries."""
        return entries.num

    @abstractmethod
    def encode(
        self, entries: Entries, num_units: int, buffer: Tensor | None = None
    ) -> Payload:
        """Writes entries (ascending, without duplicates, each below ``num_units``).

        The payload lies in ``buffer`` (uint8, exactly ``size_bytes`` long), or without
        it in a new one.
        """

    def with_values(
        self, entries: Entries, num_units: int, buffer: Tensor | None
    ) -> Payload:
        """The payload to be encoded to, with all but the places of the entries."""
        check_entries(entries)
        form = self.layout(entries.num, num_units, entries.width, entries.values.dtype)
        payload = Payload.empty(form, buffer, entries.values.device)
        payload["values"].copy_(entries.values)
        return payload

    @abstractmethod
    def decode(
        self,
        payload: Payload,
        num_units: int,
        width: int = 1,
        *,
        room: Tensor | None = None,
    ) -> Entries:
        """The entries, ascending; views of the payload where it holds them unpacked.

        Where it does not, places lie in the front of ``room`` (int32, one for each
        entry) or, without it, in a new tensor.

        Formats that carry more units than they were given (``blocks``, ``dense``) leave
        out units of zeros.
        """

    def scatter(
        self,
        payload: Payload,
        part: Part,
        out_N: Tensor,
        *,
        scale: float = 1.0,
        width: int = 1,
    ) -> None:
        """``out[index] = scale * value`` of ``part``; see ``sparse.scatter``."""
        scatter_entries(self.decode(payload, part.length, width), part, out_N, scale)
