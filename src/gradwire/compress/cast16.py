"""cast16: gradients rounded to bfloat16 or float16.

Source: torch's fp16 and bf16 communication hooks.
Differences: runs on every backend. ``allreduce`` adds up in float32, where these hooks
    add in 16 bits: a mean has two roundings, of each gradient and of the mean, whatever
    the number of ranks. A collective that sums 16-bit values on the way, as ``ring``,
    has them divided by the world size before the cast. So a sum cannot leave float16's
    range where the mean does not.
Wire: values_N in 16 bits -> 2 * N bytes.
State: none. Contributed: the rounded gradient.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..contract import Layout, Memory, Residual, State, Traits
from ..contract.bounds import check_choice
from ..contract.payload import Field, Format, Payload
from ..contract.spec import TensorSpec, spec_of
from ..kernels import cast
from ._prescale import Prescaled
from ._residual import as_working

_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class cast16(Prescaled):
    """Rounds gradients to 16 bits.

    Args:
        dtype: ``torch.bfloat16`` (the default) has the range of float32 and 8 bits of
            precision. ``torch.float16`` has 11 bits, and overflows above 65504. Both
            take 2 bytes an element.
        prescale: The factor of values on the wire, from 2**-24 to 1; default 1.
            Collectives that sum values on the way set it to 1/W, W being the number of
            ranks. Users leave it out.

    >>> codec = cast16(dtype=torch.float16)
    >>> payload, _ = codec.encode(None, torch.tensor([1.0, 1 / 3]))
    >>> codec.decode(payload, torch.empty(2)), payload.size_bytes
    (tensor([1.0000, 0.3333]), 4)
    """

    dtype: torch.dtype = torch.bfloat16
    prescale: float = 1.0
    traits: ClassVar[Traits] = Traits(
        layout=Layout.DENSE, additive=True, nonexpansive=True
    )

    def __post_init__(self) -> None:
        check_choice("cast16 dtype", self.dtype, _DTYPES)
        super().__post_init__()

    def format(self, spec: TensorSpec) -> Format:
        return Format((Field("values", self.dtype, spec.numel),))

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Residual = None,
        buffer: Memory = None,
    ) -> tuple[Payload, State]:
        payload = Payload.empty(self.format(spec_of(grad_N)), buffer, grad_N.device)
        cast.cast16_encode(
            as_working(grad_N), payload["values"], self.prescale, residual_N
        )
        return payload, state

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        cast.cast16_decode(payload["values"], out_N, scale / self.prescale)
        return out_N

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        cast.cast16_decode(payload["values"], sum_N, scale / self.prescale, add=True)


EXAMPLES = (cast16(), cast16(dtype=torch.float16))
