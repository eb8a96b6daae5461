"""The contracts: what a compressor is, what it declares, and what a rank brings to an exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from .payload import Format, Payload
from .spec import TensorSpec

State = Any
"""Whatever an algorithm keeps between steps: None, a tensor, or a NamedTuple of states."""


class Layout(Enum):
    """What a payload holds."""

    DENSE = "dense"
    PACKED = "packed"
    SPARSE = "sparse"


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a compressor promises; ``pair`` decides by these and never by a name."""

    layout: Layout
    lossless: bool = False
    """decode(encode(x)) is x, bit for bit, in the gradient's own dtype."""
    additive: bool = False
    """Payloads may be summed element by element by a library all-reduce."""
    exact_sum: bool = True
    """Such a sum is as accurate as one in the gradient's working dtype."""
    exact_size: bool = True
    """The payload's size follows from the spec alone."""
    unbiased: bool = False
    """The expectation of decode(encode(x)) is x."""
    contraction: bool = False
    """||x - decode(encode(x))|| <= ||x|| for every x within the wire dtype's range."""
    error_feedback: bool = False
    """Trains well only if what was not sent is kept for the next step."""


class Compressor(ABC):
    """Encodes a flat gradient into a payload and back.

    Concrete compressors are frozen keyword-only dataclasses: settings only. What changes from step
    to step is the state, made by ``init`` and owned by the caller.
    """

    traits: ClassVar[Traits]

    def for_world(self, world: int) -> Compressor:
        """The variant to use among ``world`` ranks; most compressors do not depend on it."""
        return self

    def init(self, spec: TensorSpec) -> State:
        """State before the first step. Default: none."""
        return None

    @abstractmethod
    def format(self, spec: TensorSpec) -> Format:
        """Layout, and so size, of the payload of a gradient of this spec."""

    @abstractmethod
    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Tensor | None = None,
        buffer: Tensor | None = None,
    ) -> tuple[Payload, State]:
        """Encodes ``grad_N`` (1-D, any floating dtype; never written).

        With ``residual_N`` (working dtype) the sum of both is encoded, and ``residual_N`` then
        holds what of that sum the payload lacks. ``buffer`` (uint8, ``format(spec).size_bytes``
        long) is where the payload is to lie; without it a new one is made.
        """

    @abstractmethod
    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        """Writes ``scale`` times the decoded gradient into ``out_N`` and returns it."""

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        """Adds ``scale`` times the decoded gradient to ``sum_N``: CaSync's merge after decode."""
        sum_N.add_(self.decode(payload, torch.empty_like(sum_N)), alpha=scale)


class Member:
    """One rank's place in one message: who it is, among how many, and the buffers it may reuse.

    Buffers are found by name, so the second and all later steps allocate nothing.
    """

    __slots__ = ("_buffers", "rank", "world")

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self._buffers: dict[str, Tensor] = {}

    def scratch(self, name: str, numel: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A buffer of ``numel`` elements on the device of ``like``; its content is undefined."""
        found = self._buffers.get(name)
        if (
            found is None
            or found.numel() != numel
            or found.dtype != dtype
            or found.device != like.device
        ):
            found = torch.zeros(numel, dtype=dtype, device=like.device)
            self._buffers[name] = found
        return found
