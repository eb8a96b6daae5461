"""hash_bitmap: a bit for each place of a part, and the values of set places.

Source: ZEN (OSDI 2025), section 3.3.2, algorithm 2.
Differences: bit i of part w is place w L + i of a permutation, whose inverse gives the
    index; the paper looks it up in the part's sorted index set, which every rank has to
    hold (4 bytes for each unit of the vector). Values are in the order of places, not
    of indices.
Wire: values (K * width), bits -> K * width * itemsize + ceil(L / 8) bytes; of all parts
    together about num_units / 8 bytes for the bits, however many parts there are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ....contract.payload import Field, Format, Payload
from .. import bits
from ..entries import Entries
from ..format import SparseFormat


@dataclass(frozen=True, kw_only=True)
class hash_bitmap(SparseFormat):
    """Values in ascending order of their local places, then one bit for each place.

    >>> hash_bitmap().size_bytes(100, 1_250)
    557
    """

    def layout(
        self,
        count: int,
        num_units: int,
        width: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> Format:
        # Values first, as they lie aligned so without a gap.
        bitmap = Field("bits", torch.uint8, bits.num_bytes(num_units))
        return Format((Field("values", dtype, count * width), bitmap))

    def encode(
        self, entries: Entries, num_units: int, buffer: Tensor | None = None
    ) -> Payload:
        payload = self.with_values(entries, num_units, buffer)
        bits.write(entries.indices_K, num_units, payload["bits"])
        return payload

    def decode(
        self,
        payload: Payload,
        num_units: int,
        width: int = 1,
        *,
        room: Tensor | None = None,
    ) -> Entries:
        values = payload["values"]
        count = values.numel() // width
        return Entries(
            bits.read(payload["bits"], num_units, count, room), values, width
        )


EXAMPLES = (hash_bitmap(),)
