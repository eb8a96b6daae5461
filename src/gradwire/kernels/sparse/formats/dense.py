"""dense: every unit, without indices, for payloads that are hardly sparse.

Source: ZEN (OSDI 2025), definition 1.
Differences: none.
Wire: values (num_units * width) -> num_units * width * itemsize bytes, whatever the
entries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ....contract.payload import Field, Format, Payload
from ..entries import Entries, check_entries, drop_unset
from ..format import SparseFormat
from ..scatter import put_units


@dataclass(frozen=True, kw_only=True)
class dense(SparseFormat):
    """All units in ascending order.

    >>> dense().size_bytes(100, 10_000)
    40000
    """

    def layout(
        self,
        count: int,
        num_units: int,
        width: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> Format:
        return Format((Field("values", dtype, num_units * width),))

    def encode(
        self, entries: Entries, num_units: int, buffer: Tensor | None = None
    ) -> Payload:
        check_entries(entries)
        indices_K, values, width = entries
        form = self.layout(entries.num, num_units, width, values.dtype)
        payload = Payload.empty(form, buffer, values.device)
        put_units(payload["values"].zero_(), indices_K, values.view(-1, width))
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
        every = torch.arange(num_units, dtype=torch.int32, device=values.device)
        return drop_unset(Entries(every, values, width))


EXAMPLES = (dense(),)
