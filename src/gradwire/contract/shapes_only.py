"""Hollow: a compressor's sizes without its work, which is what predictions are made with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .compressor import Compressor, State, Traits
from .payload import Format, Payload
from .spec import TensorSpec


@dataclass(frozen=True)
class Hollow(Compressor):
    """Makes payloads of typical size that hold nothing, and touches no element."""

    codec: Compressor

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return self.codec.traits

    @property
    def width(self) -> int:
        return self.codec.width

    def for_world(self, world: int, rank: int = 0) -> Compressor:
        return Hollow(self.codec.for_world(world, rank))

    def chunk(self, start: int, stop: int) -> Compressor:
        return Hollow(self.codec.chunk(start, stop))

    def format(self, spec: TensorSpec) -> Format:
        return self.codec.typical(spec)

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Tensor | None = None,
        buffer: Tensor | None = None,
    ) -> tuple[Payload, State]:
        form = self.format(TensorSpec("", grad_N.numel(), grad_N.dtype))
        return Payload.empty(form, buffer, grad_N.device), state

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        return out_N

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        """Adds nothing."""
