"""What a collective is and what it needs of a compressor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..contract import Compressor, Layout, Member, State, Traits
from ..spec import TensorSpec
from ._verbs import Steps


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a collective asks of a compressor's traits; ``None`` and ``False`` ask nothing."""

    additive: bool = False
    exact_size: bool = False
    layout: Layout | None = None

    def refusal(self, traits: Traits) -> str | None:
        """Why a compressor of these traits cannot be used, or None if it can."""
        if self.additive and not traits.additive:
            return "it sums payloads on the way, and these payloads cannot be summed"
        if self.exact_size and not traits.exact_size:
            return "it cuts messages by size beforehand, and these payloads vary in size"
        if self.layout is not None and traits.layout is not self.layout:
            return f"it needs {self.layout.value} payloads, and these are {traits.layout.value}"
        return None


class Collective(ABC):
    """Combines payloads among ranks. Concrete ones are frozen keyword-only dataclasses."""

    needs: ClassVar[Needs]

    def init(self, codec: Compressor, spec: TensorSpec, world: int) -> State:
        """State before the first step. Default: the codec's."""
        return codec.init(spec)

    @abstractmethod
    def run(
        self,
        codec: Compressor,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None,
    ) -> Steps[State]:
        """Leaves the mean over ranks in ``out_N`` and returns the new state.

        ``out_N`` may be ``grad_N`` itself. With ``residual_N`` (working dtype) the sum of both is
        what this rank contributes, and ``residual_N`` afterwards holds what of it did not arrive
        in the mean, losses at this rank's re-encoding included.
        """

    @abstractmethod
    def wire_bytes(self, codec: Compressor, spec: TensorSpec, world: int) -> list[int]:
        """Bytes that each rank sends for one tensor, of payloads as large as ``codec.format``.

        Where sizes vary that is a bound.
        """
