"""Shares: a message cut among the ranks of one host, of which each exchanges an equal share.

Every share has the same shapes, so that an exchange of shares is made alike on all ranks. Each
tensor is cut by itself and so keeps its place on the host, whatever message it travels in.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]

_ROWS_EACH = 16
"""The fewest rows that each share must get for a tensor to be cut between rows: filling up costs at
most a row for each share."""


class Range(NamedTuple):
    """Elements ``start`` to ``stop`` of a message, which lie at ``place`` of a share and behind."""

    start: int
    stop: int
    place: int


class Shares:
    """The shares of a message, one for each rank of a host, all of ``numel`` elements.

    Every tensor is cut into equal parts, and a share holds one of each tensor, in order.
    """

    def __init__(self, shapes: Shapes, count: int) -> None:
        self.count = count
        self.parts = tuple(_part(shape, count) for shape in shapes)
        self.numel = sum(self.parts)
        self._ranges: list[tuple[Range, ...]] = []
        lengths = []
        for share in range(count):
            ranges, start, place = [], 0, 0
            for shape, part in zip(shapes, self.parts, strict=True):
                size = prod(shape)
                first, last = min(share * part, size), min((share + 1) * part, size)
                ranges.append(Range(start + first, start + last, place))
                start, place = start + size, place + part
            self._ranges.append(tuple(ranges))
            lengths.append([one.stop - one.start for one in ranges])
        tensors = range(len(shapes))
        # How a message, and all shares one behind the other, are split into the same pieces.
        self._of_message = [lengths[share][t] for t in tensors for share in range(count)]
        self._of_shares = [
            size
            for share in range(count)
            for t in tensors
            for size in (lengths[share][t], self.parts[t] - lengths[share][t])
        ]
        self._order = [2 * (share * len(shapes) + t) for t in tensors for share in range(count)]
        self._filled = [i for i in range(1, len(self._of_shares), 2) if self._of_shares[i]]
        self.is_filled = bool(self._filled)
        """Whether some shares hold more than elements of the message."""
        self.in_place = len(shapes) == 1 and not self._filled
        """Whether the shares, one behind the other, are the message itself."""

    def ranges(self, share: int) -> tuple[Range, ...]:
        """The ranges of a message that a share holds, one for each tensor; some may be empty."""
        return self._ranges[share]

    def cut(self, grad_N: Tensor, into_M: Tensor) -> None:
        """Writes all shares of a message into ``into_M``, one behind the other."""
        slots = torch.split(into_M, self._of_shares)
        torch._foreach_copy_([slots[i] for i in self._order], torch.split(grad_N, self._of_message))
        for i in self._filled:
            slots[i].zero_()

    def join(self, shares_M: Tensor, out_N: Tensor) -> None:
        """Writes the message whose shares lie in ``shares_M``, one behind the other."""
        slots = torch.split(shares_M, self._of_shares)
        torch._foreach_copy_(torch.split(out_N, self._of_message), [slots[i] for i in self._order])

    def clear_filled(self, own_S: Tensor, share: int) -> None:
        """Sets to 0 what lies in a share beside elements of the message."""
        for one, part in zip(self.ranges(share), self.parts, strict=True):
            own_S[one.place + one.stop - one.start : one.place + part] = 0

    def own(self, whole_N: Tensor, share: int) -> Tensor:
        """A new tensor: one share of a message; zeros where it is filled up."""
        own_S = whole_N.new_zeros(self.numel)
        for one in self.ranges(share):
            own_S[one.place : one.place + one.stop - one.start] = whole_N[one.start : one.stop]
        return own_S

    def put(self, own_S: Tensor, share: int, into_N: Tensor) -> None:
        """Writes one share into its place in a message; other elements stay as they are."""
        for one in self.ranges(share):
            into_N[one.start : one.stop] = own_S[one.place : one.place + one.stop - one.start]


def _part(shape: tuple[int, ...], count: int) -> int:
    """The elements of a tensor that each of ``count`` shares holds."""
    size = prod(shape)
    unit = size // shape[0] if len(shape) > 1 and shape[0] >= _ROWS_EACH * count else 1
    return -(-size // (count * unit)) * unit if unit else 0


@lru_cache(maxsize=4096)
def shares_of(shapes: Shapes, count: int) -> Shares:
    """The shares of a message of tensors of these shapes among ``count`` ranks of a host.

    >>> shares = shares_of(((3,), (2, 2)), 2)
    >>> shares.numel, [tuple(one) for one in shares.ranges(1)]
    (4, [(2, 3, 0), (5, 7, 2)])
    """
    return Shares(shapes, count)
