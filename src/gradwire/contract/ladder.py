"""Ladder: an algorithm at several settings, of which each tensor of a message may take one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from .compressor import State
from .member import Member
from .spec import TensorSpec
from .verbs import Steps


class Ladder(ABC):
    """The rungs of an algorithm: its settings, from the fewest bytes to the most.

    Letters: T tensors of a message, L rungs. A message's rungs are a number for each tensor. The
    state is of one form whatever the rungs are, so they may change from step to step.
    """

    @property
    @abstractmethod
    def settings(self) -> tuple[str, ...]:
        """The settings of each rung, in words."""

    @property
    @abstractmethod
    def given(self) -> int:
        """The rung of the algorithm's own settings."""

    @abstractmethod
    def bytes_TL(self, spec: TensorSpec) -> list[list[int]]:
        """Bytes of each tensor at each rung, in proportion to what travels."""

    @abstractmethod
    def init(self, spec: TensorSpec, world: int) -> State:
        """State before the first step."""

    @abstractmethod
    def measure(self, me: Member, state: State, whole_N: Tensor) -> Steps[Tensor]:
        """The squared norm of what each rung would lose of ``whole_N`` (working dtype).

        Returns this rank's, in float64: a row for each tensor, a column for each rung. Changes no
        state.
        """

    @abstractmethod
    def synchronise(
        self,
        me: Member,
        state: State,
        rungs: Sequence[int],
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None,
    ) -> Steps[State]:
        """The exchange with these rungs; see ``Exchange.synchronise``."""
