"""onebit: the sign of every element, decoded to the mean of its side.

Source: Seide et al., Interspeech 2014, section 3; HiPress section 4.4.
Differences: the two means are taken over blocks of 65536 elements instead of columns of a matrix. A
    block stays in the cache between the pass that averages and the pass that encodes, so a gradient
    is read from memory once; the header is 8 bytes a block.
Wire: scales_B2 float32 (mean of the negatives, mean of the others), bits_N (1: not negative, bit i
    of byte j is element 8j+i) -> 8 * ceil(N / block) + ceil(N / 8) bytes.
State: none. Contributed: the decoded gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..contract import Compressor, Layout, State, Traits
from ..errors import invalid
from ..kernels import onebit as kernel
from ..payload import Field, Format, Payload
from ..spec import CHUNK_ALIGNMENT, TensorSpec
from ._settle import as_working, spec_of


@dataclass(frozen=True, kw_only=True)
class onebit(Compressor):
    """One bit an element, two means a block.

    ``block`` is the number of elements that share their two means, a multiple of 8.

    >>> codec = onebit()
    >>> payload, _ = codec.encode(None, torch.tensor([-1.0, -3.0, 2.0, 4.0]))
    >>> codec.decode(payload, torch.empty(4)), payload.size_bytes
    (tensor([-2., -2.,  3.,  3.]), 9)
    """

    block: int = 65536
    traits: ClassVar[Traits] = Traits(layout=Layout.PACKED, contraction=True, error_feedback=True)

    def __post_init__(self) -> None:
        if self.block <= 0 or self.block % CHUNK_ALIGNMENT:
            raise invalid(
                "onebit block", self.block, "a positive multiple of 8", "use the default, 65536"
            )

    def format(self, spec: TensorSpec) -> Format:
        num_blocks = -(-spec.numel // self.block)
        return Format(
            (
                Field("scales", torch.float32, 2 * num_blocks),
                Field("bits", torch.uint8, -(-spec.numel // 8)),
            )
        )

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Tensor | None = None,
        buffer: Tensor | None = None,
    ) -> tuple[Payload, State]:
        payload = Payload.empty(self.format(spec_of(grad_N)), buffer, grad_N.device)
        kernel.encode(
            as_working(grad_N),
            payload["scales"].view(-1, 2),
            payload["bits"],
            residual_N,
            block=self.block,
        )
        return payload, state

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        kernel.decode(
            payload["scales"].view(-1, 2), payload["bits"], out_N, block=self.block, scale=scale
        )
        return out_N

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        scales_B2 = payload["scales"].view(-1, 2)
        if scale != 1.0:
            scales_B2 = scales_B2 * scale
        kernel.decode_add(scales_B2, payload["bits"], sum_N, block=self.block)


EXAMPLES = (onebit(), onebit(block=64))
