"""What every generated compressor does: the methods of ``contract.Compressor``, by four kernels.

Kernels take float32 vectors that lie in one piece. Gradients of another dtype are converted to it
first, sums and residuals of another dtype are computed by torch from what was sent.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ..contract import Compressor, State
from ..errors import invalid
from ..payload import Field, Format, Payload
from ..spec import TensorSpec
from .build import Built
from .interp import Draws
from .ir import FLOAT32, INT32, UNSIGNED, Buffer, DType, Extent, Kernel
from .rewrite import Traced


@dataclass(frozen=True)
class Kernels:
    """The four forms of a program under given settings, and what runs them."""

    traced: Traced
    encode: Kernel
    encode_with_residual: Kernel
    decode: Kernel
    merge: Kernel
    built: Built


class Generated(Compressor):
    """A compressor whose work is done by ``kernels()``."""

    @abstractmethod
    def kernels(self) -> Kernels:
        """The kernels under these settings."""

    def init(self, spec: TensorSpec) -> State:
        """(stream, step) if random numbers are drawn. Compiles now, and not in the first step."""
        made = self.kernels()
        made.built.library()
        return torch.tensor([crc32(spec.name.encode()), 0]) if made.encode.draws else None

    def format(self, spec: TensorSpec) -> Format:
        return _format(self, spec.numel)

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Tensor | None = None,
        buffer: Tensor | None = None,
    ) -> tuple[Payload, State]:
        if grad_N.dim() != 1:
            raise invalid("gradient", tuple(grad_N.shape), "one-dimensional", "pass grad.flatten()")
        payload = Payload.empty(_format(self, grad_N.numel()), buffer, grad_N.device)
        draws = self._draws(state)
        if residual_N is None or _fits(residual_N):
            self._encode(payload, grad_N, residual_N, draws)
        else:
            whole_N = grad_N + residual_N
            self._encode(payload, whole_N, None, draws)
            left_N = whole_N - self.decode(payload, torch.empty_like(whole_N))
            residual_N.copy_(torch.where(left_N.isfinite(), left_N, residual_N))
        return payload, state if state is None else state + torch.tensor([0, 1])

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        to_N = out_N if _fits(out_N) else torch.empty(out_N.numel(), device=out_N.device)
        self._decode("decode", "out", payload, to_N, scale)
        return out_N if to_N is out_N else out_N.copy_(to_N)

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        if _fits(sum_N):
            self._decode("merge", "sum", payload, sum_N, scale)
        else:
            sum_N.add_(self.decode(payload, torch.empty_like(sum_N), scale=scale))

    def _encode(
        self, payload: Payload, grad_N: Tensor, residual_N: Tensor | None, draws: Draws
    ) -> None:
        made = self.kernels()
        operands = {"gradient": grad_N.to(torch.float32).contiguous()}
        kernel = made.encode
        if residual_N is not None:
            operands["residual"] = residual_N
            kernel = made.encode_with_residual
        made.built.run(kernel, {**operands, **_fields(payload)}, grad_N.numel(), draws)

    def _decode(self, form: str, name: str, payload: Payload, to_N: Tensor, scale: float) -> None:
        made = self.kernels()
        factor = torch.tensor([scale], dtype=torch.float32, device=to_N.device)
        operands = {name: to_N, "scale": factor, **_fields(payload)}
        made.built.run(getattr(made, form), operands, to_N.numel(), Draws())

    def _draws(self, state: State) -> Draws:
        """The numbers of this call: the key is the program's ``seed`` and the tensor's stream."""
        stream, step = (0, 0) if state is None else state.tolist()
        return Draws((getattr(self, "seed", 0) & 0xFFFFFFFF) + (stream << 32), step)


def _fits(vector_N: Tensor) -> bool:
    return vector_N.dtype == torch.float32 and vector_N.is_contiguous()


def _fields(payload: Payload) -> dict[str, Tensor]:
    return {field.name: payload[field.name] for field in payload.format}


@lru_cache(maxsize=4096)
def _format(codec: Generated, numel: int) -> Format:
    traced = codec.kernels().traced
    num_blocks = -(-numel // traced.block)
    return Format(tuple(_field(buffer, numel, num_blocks) for buffer in traced.buffers))


def _field(buffer: Buffer, numel: int, num_blocks: int) -> Field:
    count = numel if buffer.extent is Extent.ELEMENT else num_blocks
    if buffer.dtype in UNSIGNED:
        bits = buffer.dtype.bits if buffer.extent is Extent.ELEMENT else 8
        return Field(buffer.name, torch.uint8, -(-count * bits // 8))
    dtypes: dict[DType, Any] = {FLOAT32: torch.float32, INT32: torch.int32}
    return Field(buffer.name, dtypes[buffer.dtype], count)
