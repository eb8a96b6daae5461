"""Slots: where ranges of gradients lie in the flat buffer of their message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...contract.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a range of one parameter's gradient lies in its message.

    The range starts at ``first`` of the parameter and is ``start:stop`` of the message.
    """

    name: str
    first: int
    start: int
    stop: int
    is_whole: bool

    @property
    def last(self) -> int:
        return self.first + self.stop - self.start

    def __str__(self) -> str:
        return self.name if self.is_whole else f"{self.name}[{self.first}:{self.last}]"


class KeptBuffer:
    """A message's flat gradient, and the part of each slot.

    The part of a whole gradient has its shape, as the gradient may have strides of its own.
    """

    def __init__(self, spec: TensorSpec, slots: Sequence[Slot]) -> None:
        self.flat_N = torch.zeros(spec.numel, dtype=spec.dtype)
        self.views = [
            self.flat_N[slot.start : slot.stop].view(shape)
            for slot, shape in zip(slots, spec.shapes, strict=False)  # flags have no slot
        ]


def range_in(grad: Tensor, slot: Slot) -> Tensor:
    """The range of a gradient that travels in a slot; a gradient that is cut is contiguous."""
    return grad if slot.is_whole else grad.view(-1)[slot.first : slot.last]
