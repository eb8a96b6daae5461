"""bitmap: a bit for each unit of the vector, and the values of the units whose bits are
set.

Source: ZEN (OSDI 2025), section 3.3.1.
Differences: none. Bit i is index i, so a part whose units lie anywhere (a permuted one)
    needs a bit for each unit of the whole vector; ``hash_bitmap`` needs one for each of
    its own.
Wire: values (K * width), bits -> K * width * itemsize + ceil(num_units / 8) bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire.contract.payload import Payload
from gradwire.errors import invalid
from gradwire.kernels.sparse.entries import Part
from gradwire.kernels.sparse.formats.hash_bitmap import hash_bitmap


@dataclass(frozen=True, kw_only=True)
class bitmap(hash_bitmap):
    """Values in ascending order of their indices, then one bit for each unit.

    >>> bitmap().size_bytes(100, 10_000)
    1650
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
        if part.permutation is not None:
            raise invalid(
                "part of a bitmap",
                "a permuted one",
                "a range of indices, which is what its bits stand for",
                "use hash_bitmap",
            )
        super().scatter(payload, part, out_N, scale=scale, width=width)
