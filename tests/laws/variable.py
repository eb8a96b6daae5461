"""Two sound compressors whose payloads vary in size; ``broken_variable`` has wrong
ones.

K is the number of elements that a payload holds, N of the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.contract import Compressor, Layout, State, Traits
from gradwire.contract.payload import Field, Format, Payload
from gradwire.contract.spec import TensorSpec, working_dtype

Encoded = tuple[Payload, State]


@dataclass(frozen=True, kw_only=True)
class above(Compressor):
    """Sound: sends all elements that exceed ``threshold`` in magnitude, as NaN does
    too.

    A negative threshold makes every payload as large as it can be.
    """

    threshold: float = 1.0
    traits: ClassVar[Traits] = Traits(
        layout=Layout.SPARSE, exact_size=False, nonexpansive=True, error_feedback=True
    )

    def layout(self, spec: TensorSpec, num_kept: int) -> Format:
        """The layout of a payload of so many elements."""
        values = Field("values", working_dtype(spec.dtype), num_kept)
        return Format((values, Field("indices", torch.int32, num_kept)))

    def format(self, spec: TensorSpec) -> Format:
        return self.layout(spec, spec.numel)

    def typical(self, spec: TensorSpec) -> Format:
        return self.layout(spec, -(-spec.numel // 10))

    def received(self, spec: TensorSpec, size_bytes: int) -> Format:
        num_kept, rest = divmod(size_bytes, self.layout(spec, 1).size_bytes)
        if rest or not 0 <= num_kept <= spec.numel:
            raise self.no_such_size(spec, size_bytes)
        return self.layout(spec, num_kept)

    def encode(self, state, grad_N, *, residual_N=None, buffer=None):
        whole_N = grad_N.to(working_dtype(grad_N.dtype))
        if residual_N is not None:
            whole_N = whole_N + residual_N
        kept_N = ~(whole_N.abs() <= self.threshold)
        form = self.layout(
            TensorSpec("", grad_N.numel(), grad_N.dtype), int(kept_N.sum())
        )
        payload = Payload.empty(
            form, None if buffer is None else buffer[: form.size_bytes]
        )
        payload["values"].copy_(whole_N[kept_N])
        payload["indices"].copy_(kept_N.nonzero().flatten())
        if residual_N is not None:
            residual_N.copy_(whole_N.masked_fill(kept_N, 0.0))
        return payload, state

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        out_N.zero_()
        out_N[payload["indices"].long()] = (payload["values"] * scale).to(out_N.dtype)
        return out_N


@dataclass(frozen=True, kw_only=True)
class trimmed(Compressor):
    """Sound and lossless: sends all elements but the zeros at the end."""

    traits: ClassVar[Traits] = Traits(
        layout=Layout.DENSE, exact_size=False, lossless=True, nonexpansive=True
    )

    def format(self, spec: TensorSpec) -> Format:
        return Format((Field("values", spec.dtype, spec.numel),))

    def received(self, spec: TensorSpec, size_bytes: int) -> Format:
        num_sent, rest = divmod(size_bytes, spec.dtype.itemsize)
        if rest or not 0 <= num_sent <= spec.numel:
            raise self.no_such_size(spec, size_bytes)
        return Format((Field("values", spec.dtype, num_sent),))

    def encode(self, state, grad_N, *, residual_N=None, buffer=None):
        exact_N = grad_N if residual_N is None else grad_N + residual_N
        sent_N = exact_N.to(grad_N.dtype)
        is_sent_N = (sent_N != 0) | sent_N.signbit()
        num_sent = int(is_sent_N.nonzero().max()) + 1 if bool(is_sent_N.any()) else 0
        form = Format((Field("values", grad_N.dtype, num_sent),))
        payload = Payload.empty(
            form, None if buffer is None else buffer[: form.size_bytes]
        )
        payload["values"].copy_(sent_N[:num_sent])
        if residual_N is not None:
            left_N = exact_N - sent_N
            residual_N.copy_(left_N.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
        return payload, state

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        values_K = payload["values"]
        out_N[values_K.numel() :] = 0
        exact_K = values_K.to(working_dtype(values_K.dtype)) * scale
        out_N[: values_K.numel()] = values_K if scale == 1 else exact_K
        return out_N


SOUND = (above(), above(threshold=0.1), above(threshold=-1.0), trimmed())
