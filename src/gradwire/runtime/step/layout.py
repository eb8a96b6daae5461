"""MessageLayout: where gradients lie in the flat buffer of their message.

Ranges of gradients lie one behind the other, and the elements of flags behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ...contract.spec import TensorSpec


class ParamRange(NamedTuple):
    """Elements ``first`` up to, not including, ``last`` of a parameter's gradient."""

    name: str
    param: Tensor
    first: int
    last: int

    @classmethod
    def whole(cls, name: str, param: Tensor) -> ParamRange:
        return cls(name, param, 0, param.numel())


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


class MessageLayout:
    """The slots of ``ranges`` in a message.

    Behind the gradients lie ``num_flags`` elements that no slot holds. ``device`` is
    the type of the device where the message is encoded.
    """

    def __init__(
        self,
        name: str,
        ranges: Sequence[ParamRange],
        *,
        num_flags: int,
        device: str,
        rank: int,
    ) -> None:
        self.slots: list[Slot] = []
        shapes = []
        end = 0
        for one in ranges:
            start = end
            end += one.last - one.first
            is_whole = end - start == one.param.numel()
            self.slots.append(Slot(one.name, one.first, start, end, is_whole))
            # a part is a vector, whatever the shape of the whole
            shapes.append(tuple(one.param.shape) if is_whole else (end - start,))
        if num_flags:
            shapes.append((num_flags,))
        self.names = list(dict.fromkeys(slot.name for slot in self.slots))
        self.num_flags = num_flags
        dtype = ranges[0].param.dtype
        numel = end + num_flags
        self.spec = TensorSpec(name, numel, dtype, tuple(shapes), device, rank)
