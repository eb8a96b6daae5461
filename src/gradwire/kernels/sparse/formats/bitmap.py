"""bitmap: a bit for each unit of the vector, and the values of the units whose bits are set.

Source: ZEN (OSDI 2025), section 3.3.1.
Differences: none. Bit i is index i, so a part whose units lie anywhere (a permuted one) needs a bit
    for each unit of the whole vector; ``hash_bitmap`` needs one for each of its own.
Wire: values (K * width), bits -> K * width * itemsize + ceil(num_units / 8) bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....contract.payload import Format, Payload
from ....errors import invalid
from .. import bits
from ..entries import Entries, Part, check_entries
from ..format import SparseFormat


@dataclass(frozen=True, kw_only=True)
class bitmap(SparseFormat):
    """Values in ascending order of their indices, then one bit for each unit.

    >>> bitmap().size_bytes(100, 10_000)
    1650
    """

    def layout(
        self, count: int, num_units: int, width: int = 1, dtype: torch.dtype = torch.float32
    ) -> Format:
        return bits.layout(count, num_units, width, dtype)

    def encode(self, entries: Entries, num_units: int, buffer: Tensor | None = None) -> Payload:
        check_entries(entries)
        return bits.encode(entries, num_units, buffer)

    def decode(
        self, payload: Payload, num_units: int, width: int = 1, *, room: Tensor | None = None
    ) -> Entries:
        return bits.decode(payload, num_units, width, room)

    def scatter(
        self,
        payload: Payload,
        part: Part,
        out_N: Tensor,
        *,
        scale: float = 1.0,
        width: int = 1,
    ) -> None:
        if part.permutation is not None:
            raise invalid(
                "part of a bitmap",
                "a permuted one",
                "a range of indices, which is what its bits stand for",
                "use hash_bitmap",
            )
        super().scatter(payload, part, out_N, scale=scale, width=width)


EXAMPLES = (bitmap(),)
