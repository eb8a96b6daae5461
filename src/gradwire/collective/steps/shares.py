"""Shares: the parts of a message that the ranks of one host exchange with other hosts.

Equal shares hold an equal part of each tensor. Every share has the same shapes, so that
an exchange of shares is made alike on all ranks. Each tensor is cut by itself and so
keeps its place on the host, whatever message it travels in.

Whole shares hold tensors uncut, for exchanges that act on matrices or layers. They
differ in length, and a share may be empty. A tensor's owner depends on the other
tensors of its message.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]

_ROWS_EACH = 16
"""The fewest rows that each share must get for a tensor to be cut between rows: filling
up costs at most a row for each share.
"""


class Range(NamedTuple):
    """Elements ``start`` to ``stop`` of a message, from ``place`` of a share on."""

    start: int
    stop: int
    place: int


class Shares:
    """The shares of a message, one for each rank of a host.

    By default every tensor is cut into equal parts, and a share holds one of each
    tensor, in order. If tensors stay ``whole``, each belongs to one share: the largest
    goes first, and each goes to the share that has fewest elements by then.
    """

    def __init__(self, shapes: Shapes, count: int, *, whole: bool = False) -> None:
        self.count = count
        sizes = [prod(shape) for shape in shapes]
        parts = sizes if whole else [_part(shape, count) for shape in shapes]
        owners = pack(sizes, count) if whole else []
        tensors = range(len(shapes))
        self.tensors: list[tuple[int, ...]] = []
        """The tensors of the message of which each share holds a part, in order."""
        self.shapes: list[Shapes] = []
        """The shapes of these parts."""
        self._rooms: list[list[int]] = []
        self._ranges: list[tuple[Range, ...]] = []
        lengths = []
        for share in range(count):
            holds = [not whole or owners[t] == share for t in tensors]
            held = tuple(t for t in tensors if holds[t])
            rooms = [parts[t] if holds[t] else 0 for t in tensors]
            ranges = []
            start = 0
            place = 0
            for size, room in zip(sizes, rooms, strict=True):
                before = 0 if whole else share * room
                first = min(before, size)
                last = min(before + room, size)
                ranges.append(Range(start + first, start + last, place))
                start = start + size
                place = place + room
            self.tensors.append(held)
            self.shapes.append(tuple(shapes[t] if whole else (parts[t],) for t in held))
            self._rooms.append(rooms)
            self._ranges.append(tuple(ranges))
            lengths.append([one.stop - one.start for one in ranges])
        self.numels = tuple(map(sum, self._rooms))
        """The elements of each share."""
        # How a message, and all shares one behind the other, are split into the same
        # pieces.
        self._of_message = [
            lengths[share][t] for t in tensors for share in range(count)
        ]
        self._of_shares = [
            size
            for share in range(count)
            for t in tensors
            for size in (lengths[share][t], self._rooms[share][t] - lengths[share][t])
        ]
        self._num_pieces = 2 * len(shapes)
        self._order = [
            2 * (share * len(shapes) + t) for t in tensors for share in range(count)
        ]
        self._filled = [
            i for i in range(1, len(self._of_shares), 2) if self._of_shares[i]
        ]
        self.is_filled = bool(self._filled)
        """Whether some shares hold more than elements of the message."""
        moved = [
            i for i, size in zip(self._order, self._of_message, strict=True) if size
        ]
        self.in_place = not self._filled and moved == sorted(moved)
        """Whether the shares, one behind the other, are the message itself."""

    def ranges(self, share: int) -> tuple[Range, ...]:
        """The ranges of a message that a share holds, one for each tensor.

        Some may be empty.
        """
        return self._ranges[share]

    def cut(self, grad_N: Tensor, into_M: Tensor, *, but: int | None = None) -> None:
        """Writes all shares of a message in turn into ``into_M``, except ``but``."""
        slots = torch.split(into_M, self._of_shares)
        pieces = torch.split(grad_N, self._of_message)
        kept = [at for at in range(len(self._order)) if at % self.count != but]
        torch._foreach_copy_(
            [slots[self._order[at]] for at in kept], [pieces[at] for at in kept]
        )
        for i in self._filled:
            if i // self._num_pieces != but:
                slots[i].zero_()

    def join(self, shares: Mapping[int, Tensor], out_N: Tensor) -> None:
        """Writes these shares, by their numbers, into their places in a message."""
        slots = {
            share: torch.split(
                own_S, self._of_shares[share * self._num_pieces :][: self._num_pieces]
            )
            for share, own_S in shares.items()
        }
        pieces = enumerate(torch.split(out_N, self._of_message))
        found = [
            (one, divmod(at, self.count))
            for at, one in pieces
            if at % self.count in slots
        ]
        held = [slots[share][2 * tensor] for _, (tensor, share) in found]
        torch._foreach_copy_([one for one, _ in found], held)

    def clear_filled(self, own_S: Tensor, share: int) -> None:
        """Sets to 0 what lies in a share beside elements of the message."""
        for one, room in zip(self.ranges(share), self._rooms[share], strict=True):
            own_S[one.place + one.stop - one.start : one.place + room] = 0

    def own(self, whole_N: Tensor, share: int) -> Tensor:
        """A new tensor: one share of a message; zeros where it is filled up."""
        own_S = whole_N.new_zeros(self.numels[share])
        for one in self.ranges(share):
            own_S[one.place : one.place + one.stop - one.start] = whole_N[
                one.start : one.stop
            ]
        return own_S

    def put(self, own_S: Tensor, share: int, into_N: Tensor) -> None:
        """Writes one share into its place in a message.

        Other elements stay as they are.
        """
        for one in self.ranges(share):
            into_N[one.start : one.stop] = own_S[
                one.place : one.place + one.stop - one.start
            ]


def _part(shape: tuple[int, ...], count: int) -> int:
    """The elements of a tensor that each of ``count`` shares holds."""
    size = prod(shape)
    unit = size // shape[0] if len(shape) > 1 and shape[0] >= _ROWS_EACH * count else 1
    return -(-size // (count * unit)) * unit if unit else 0


def pack(costs: Sequence[float], num_bins: int) -> list[int]:
    """The bin of each item: each goes, by falling cost, into the lightest of its time.

    Of equals the first comes first.

    >>> pack([1.0, 5.0, 3.0, 3.0], num_bins=2)
    [0, 0, 1, 1]
    """
    bins = [(0.0, number) for number in range(num_bins)]
    found = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, lightest = bins[0]
        found[item] = lightest
        heapq.heapreplace(bins, (load + costs[item], lightest))
    return found


@lru_cache(maxsize=4096)
def shares_of(shapes: Shapes, count: int, whole: bool = False) -> Shares:
    """Shares of a message of tensors of these shapes among a host's ``count`` ranks.

    >>> shares = shares_of(((3,), (2, 2)), 2)
    >>> shares.numels, [tuple(one) for one in shares.ranges(1)]
    ((4, 4), [(2, 3, 0), (5, 7, 2)])
    >>> shares = shares_of(((3,), (2, 2), (5,)), 2, whole=True)
    >>> shares.numels, shares.shapes
    ((5, 7), [((5,),), ((3,), (2, 2))])
    """
    return Shares(shapes, count, whole=whole)
