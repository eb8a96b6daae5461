"""coo: coordinates, an index for each unit.

Source: ZEN (OSDI 2025), section 2.1 and 3.3.1; AGsparse and SparCML send this.
Differences: none; indices are int32.
Wire: indices_K int32, values (K * width) -> K * (4 + width * itemsize) bytes, and 4
    more where K is odd and values are of 8 bytes each.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ....contract.payload import Field, Format, Payload
from ..entries import Entries
from ..format import SparseFormat


@dataclass(frozen=True, kw_only=True)
class coo(SparseFormat):
    """Indices, then values; any order and duplicates are kept.

    >>> coo().size_bytes(100, 10_000)
    800
    """

    def layout(
        self,
        count: int,
        num_units: int,
        width: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> Format:
        indices = Field("indices", torch.int32, count)
        return Format((indices, Field("values", dtype, count * width)))

    def encode(
        self, entries: Entries, num_units: int, buffer: Tensor | None = None
    ) -> Payload:
        payload = self.with_values(entries, num_units, buffer)
        payload["indices"].copy_(entries.indices_K)
        return payload

    def decode(
        self,
        payload: Payload,
        num_units: int,
        width: int = 1,
        *,
        room: Tensor | None = None,
    ) -> Entries:
        return Entries(payload["indices"], payload["values"], width)


EXAMPLES = (coo(),)
