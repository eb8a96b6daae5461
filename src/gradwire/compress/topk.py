"""topk: the k elements of largest magnitude, exactly.

Source: Aji and Heafield, EMNLP 2017 (gradient dropping by magnitude); ZEN and DEFT call it Top-k.
Differences: ties go to the lowest index, and NaN ranks above infinity above all numbers, so that
    what is kept follows from the bits alone.
Wire: indices_K int32 ascending, values_K -> (4 + itemsize) * K bytes, K = max(1, round(density *
N)).
State: none. Contributed: the kept elements (rounded, if values are sent in 16 bits).

Not in CompLL's language: where the k-th magnitude lies depends on all elements, so an exact cut is
no pass over blocks. ``kernels/select`` guesses it from a sample and proves the guess with the same
read that collects the candidates. The language's ``top`` cuts what a threshold has let pass; of 8 M
float32 without one it takes 34 ms in one thread, ``kernels/select`` 5.9 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..contract import Compressor, Layout, State, Traits
from ..errors import invalid
from ..kernels import select
from ..payload import Field, Format, Payload
from ..spec import TensorSpec, working_dtype
from ._settle import as_working, spec_of

_VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class topk(Compressor):
    """Keeps the ``density`` share of elements with the largest magnitude.

    ``density`` is k/n in (0, 1]; ``values`` the dtype in which they travel (float32, or a 16-bit
    one, whose rounding error stays in the residual).

    >>> codec = topk(density=0.5)
    >>> payload, _ = codec.encode(None, torch.tensor([1.0, -4.0, 2.0, 3.0]))
    >>> payload["indices"], codec.decode(payload, torch.empty(4))
    (tensor([1, 3], dtype=torch.int32), tensor([ 0., -4.,  0.,  3.]))
    """

    density: float = 0.01
    values: torch.dtype = torch.float32
    traits: ClassVar[Traits] = Traits(layout=Layout.SPARSE, contraction=True, error_feedback=True)

    def __post_init__(self) -> None:
        if not isinstance(self.density, float | int) or not 0 < self.density <= 1:
            raise invalid(
                "topk density",
                self.density,
                "the kept fraction k/n, a number in (0, 1]",
                "write density=0.01 to keep 1 %",
            )
        if self.values not in _VALUE_DTYPES:
            raise invalid(
                "topk values",
                self.values,
                "torch.float32, torch.bfloat16 or torch.float16",
                "choose one of them",
            )

    def kept(self, numel: int) -> int:
        """How many of ``numel`` elements are kept: at least one of any non-empty gradient."""
        return max(1, round(self.density * numel)) if numel else 0

    def format(self, spec: TensorSpec) -> Format:
        if spec.numel >= 2**31:
            raise invalid(
                "topk gradient", f"{spec.numel} elements", "below 2**31", "cut it into chunks"
            )
        k = self.kept(spec.numel)
        return Format((Field("indices", torch.int32, k), Field("values", self.values, k)))

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Tensor | None = None,
        buffer: Tensor | None = None,
    ) -> tuple[Payload, State]:
        payload = Payload.empty(self.format(spec_of(grad_N)), buffer, grad_N.device)
        indices_K, values_K = payload["indices"], payload["values"]
        whole_N = as_working(grad_N)
        if values_K.dtype == whole_N.dtype:
            select.topk(whole_N, indices_K, values_K, residual_N)
            return payload, state
        exact_K = torch.empty(values_K.numel(), dtype=whole_N.dtype, device=grad_N.device)
        select.topk(whole_N, indices_K, exact_K, residual_N)
        values_K.copy_(exact_K)
        if residual_N is not None:
            lost_K = exact_K - values_K.to(exact_K.dtype)
            torch.nan_to_num_(lost_K, nan=0.0, posinf=0.0, neginf=0.0)
            residual_N[indices_K.long()] += lost_K
        return payload, state

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        out_N.zero_()
        self.merge(payload, out_N, scale=scale)
        return out_N

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        values_K = payload["values"].to(working_dtype(sum_N.dtype))
        if values_K.dtype != sum_N.dtype:
            # Scaled before it is rounded: a sum may lie beyond float16 where the mean does not.
            values_K, scale = (values_K * scale).to(sum_N.dtype), 1.0
        select.scatter_add(payload["indices"], values_K, sum_N, scale)


EXAMPLES = (topk(), topk(density=0.3), topk(density=1.0), topk(density=0.3, values=torch.bfloat16))
