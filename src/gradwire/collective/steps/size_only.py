"""A compressor's sizes without its work: predictions are made with them."""

from dataclasses import dataclass

from torch import Tensor

from ...contract import Compressor, Memory, Residual, State, Traits
from ...contract.payload import Format, Payload
from ...contract.spec import TensorSpec


@dataclass(frozen=True)
class Delegating(Compressor):
    """A compressor with the traits and the width of its ``codec``."""

    codec: Compressor

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return self.codec.traits

    @property
    def width(self) -> int:
        return self.codec.width


@dataclass(frozen=True)
class SizeOnlyCompressor(Delegating):
    """Makes payloads of typical size that hold nothing, and touches no element."""

    def for_world(self, world: int, rank: int = 0) -> Compressor:
        return SizeOnlyCompressor(self.codec.for_world(world, rank))

    def chunk(self, start: int, stop: int) -> Compressor:
        return SizeOnlyCompressor(self.codec.chunk(start, stop))

    def format(self, spec: TensorSpec) -> Format:
        return self.codec.typical(spec)

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Residual = None,
        buffer: Memory = None,
    ) -> tuple[Payload, State]:
        form = self.format(TensorSpec.of(grad_N))
        return Payload.empty(form, buffer, grad_N.device), state

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        return out_N

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        """Adds nothing."""
