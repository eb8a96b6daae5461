"""blocks: whole blocks of adjacent units that hold at least one entry.

Source: OmniReduce (Fei et al., SIGCOMM 2021), as ZEN (OSDI 2025), section 3.3.1,
compares with it.
Differences: a block's number stands before it, where OmniReduce sends that of the next
one.
Wire: indices_B int32, values (B * block * width) -> B * (4 + block * width * itemsize)
    bytes, of B blocks, and 4 more where B is odd and values are of 8 bytes each. The
    last block is filled up.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.contract import Memory
from gradwire.contract.payload import Field, Format, Payload
from gradwire.errors import invalid
from gradwire.kernels.sparse.entries import Entries, check_entries, drop_unset
from gradwire.kernels.sparse.format import SparseFormat


@dataclass(frozen=True, kw_only=True)
class blocks(SparseFormat):
    """The blocks of ``block`` units that are not zero, zeros between entries included.

    Args:
        block: The number of units in a block, from 1; default 256. A block has an index
            of 4 bytes. Longer blocks have fewer indices, and send more zeros.

    >>> blocks(block=256).size_bytes(2, 10_000)
    2056
    """

    block: int = 256

    def __post_init__(self) -> None:
        if self.block < 1:
            raise invalid(
                "block", self.block, "at least 1 unit", "OmniReduce takes 256"
            )

    def layout(
        self,
        count: int,
        num_units: int,
        width: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> Format:
        indices = Field("indices", torch.int32, count)
        return Format((indices, Field("values", dtype, count * self.block * width)))

    def count(self, entries: Entries, num_units: int) -> int:
        return self._numbers(entries).numel()

    def encode(
        self, entries: Entries, num_units: int, buffer: Memory = None
    ) -> Payload:
        check_entries(entries)
        indices_K, values, width = entries
        numbers_B = self._numbers(entries)
        form = self.layout(numbers_B.numel(), num_units, width, values.dtype)
        payload = Payload.empty(form, buffer, values.device)
        payload["indices"].copy_(numbers_B)
        block_K = torch.searchsorted(numbers_B, indices_K // self.block)
        place_K = block_K * self.block + indices_K % self.block
        units = payload["values"].zero_().view(-1, width)
        units[place_K] = values.view(-1, width)
        return payload

    def decode(
        self,
        payload: Payload,
        num_units: int,
        width: int = 1,
        *,
        room: Tensor | None = None,
    ) -> Entries:
        offsets = torch.arange(
            self.block, dtype=torch.int32, device=payload["indices"].device
        )
        indices = (payload["indices"][:, None] * self.block + offsets).reshape(-1)
        inside = int((indices < num_units).sum())  # all but the end of the last block
        units = Entries(indices[:inside], payload["values"][: inside * width], width)
        return drop_unset(units)

    def _numbers(self, entries: Entries) -> Tensor:
        number_K = entries.indices_K // self.block
        is_new_K = torch.ones_like(number_K, dtype=torch.bool)
        is_new_K[1:] = number_K[1:] != number_K[:-1]
        return number_K[is_new_K]


EXAMPLES = (blocks(), blocks(block=3))
