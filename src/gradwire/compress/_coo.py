"""Payloads of kept elements, places and values, which all flat sparsifiers share.

Letters: N elements of the gradient, K of them kept.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract import Compressor, Residual
from ..contract.payload import Field, Format, Payload
from ..contract.spec import TensorSpec, clear_not_finite, working_dtype
from ..errors import invalid
from ..kernels import select


def coo_format(num_kept: int, values: torch.dtype = torch.float32) -> Format:
    """indices_K int32, then values_K."""
    return Format(
        (Field("indices", torch.int32, num_kept), Field("values", values, num_kept))
    )


def check_addressable(name: str, spec: TensorSpec) -> None:
    """Refuses a gradient whose places int32 indices cannot tell."""
    if spec.numel >= 2**31:
        raise invalid(
            f"{name} gradient",
            f"{spec.numel} elements",
            "below 2**31",
            "cut it into chunks",
        )


def share_of(density: float, numel: int) -> int:
    """A density's number of ``numel`` elements: at least one unless it is empty."""
    return min(numel, max(1, round(density * numel)))


def round_to_wire(
    values_K: Tensor, exact_K: Tensor, indices_K: Tensor, residual_N: Residual
) -> None:
    """Fills ``values_K`` with ``exact_K`` in fewer bits.

    The residual keeps what rounding drops.
    """
    values_K.copy_(exact_K)
    if residual_N is not None:
        lost_K = exact_K - values_K.to(exact_K.dtype)
        clear_not_finite(lost_K)
        residual_N[indices_K.long()] += lost_K


@dataclass(frozen=True, kw_only=True)
class Coo(Compressor):
    """Decodes ``entries``: places (int32, ascending) and values."""

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        out_N.zero_()
        self.merge(payload, out_N, scale=scale)
        return out_N

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        indices_K, values_K = self.entries(payload)
        values_K = values_K.to(working_dtype(sum_N.dtype))
        if values_K.dtype != sum_N.dtype:
            # Scaled before it is rounded: a sum may lie beyond float16 where the mean
            # does not.
            values_K = (values_K * scale).to(sum_N.dtype)
            scale = 1.0
        select.scatter_add(indices_K, values_K, sum_N, scale)
