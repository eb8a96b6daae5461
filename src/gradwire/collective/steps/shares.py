"""Shares: the parts of a message that the ranks of one host exchange with other hosts.

Equal shares hold an equal part of each tensor. Every share has the same shapes, so that
an exchange of shares is made alike on all ranks. Each tensor is cut by itself and so
keeps its place on the host, whatever message it travels in.

Whole shares hold tensors uncut, for exchanges that act on matrices or layers. They
differ in length, and a share may be empty. A tensor's owner depends on the other
tensors of its message.
"""

import heapq
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]

_ROWS_EACH = 16
"""The fewest rows that each share must get for a tensor to be cut between rows.

Filling up costs at most a row for each share.
"""


class Range(NamedTuple):
    """Elements ``start`` to ``stop`` of a message, from ``place`` of a share on."""

    start: int
    stop: int
    place: int

    @property
    def numel(self) -> int:
        """The number of the message's elements."""
        return self.stop - self.start


class Shares:
    """The shares of a message, one for each rank of a host.

    By default every tensor is cut into equal parts, and a share holds one of each
    tensor, in order. If tensors stay ``whole``, each belongs to one share: the largest
    goes first, and each goes to the share that has fewest elements by then.
    """

    def __init__(self, shapes: Shapes, count: int, *, whole: bool = False) -> None:
        self.count = count
        sizes = [prod(shape) for shape in shapes]
        every = range(len(shapes))
        self.tensors: list[tuple[int, ...]] = [tuple(every)] * count
        """The tensors that each share holds a part of, in order."""
        parts = [_part(shape, count) for shape in shapes]
        self.shapes: list[Shapes] = [tuple((part,) for part in parts)] * count
        """The shapes of these parts."""
        self._ranges = [_equal_ranges(sizes, parts, share) for share in range(count)]
        self._rooms = [parts] * count
        """The elements that each share keeps for each tensor; some are filled up."""
        if whole:
            owners = pack(sizes, count)
            self.tensors = [
                tuple(tensor for tensor in every if owners[tensor] == share)
                for share in range(count)
            ]
            self.shapes = [
                tuple(shapes[tensor] for tensor in tensors) for tensors in self.tensors
            ]
            self._ranges = [_whole_ranges(sizes, tensors) for tensors in self.tensors]
            self._rooms = [[piece.numel for piece in ranges] for ranges in self._ranges]
        self.numels = tuple(map(sum, self._rooms))
        """The elements of each share."""
        # A message is split into pieces: for each tensor one of each share.
        self._pieces = [
            ranges[tensor].numel for tensor in every for ranges in self._ranges
        ]
        # The shares, one behind the other, are split into slots: for each share and
        # tensor a slot of the piece, and a slot that is filled up.
        self._slots = [
            numel
            for ranges, rooms in zip(self._ranges, self._rooms, strict=True)
            for piece, room in zip(ranges, rooms, strict=True)
            for numel in (piece.numel, room - piece.numel)
        ]
        self._slots_of_share = 2 * len(shapes)
        # The slot of each piece.
        self._slot_of = [
            share * self._slots_of_share + 2 * tensor
            for tensor in every
            for share in range(count)
        ]
        self._filled = [at for at in range(1, len(self._slots), 2) if self._slots[at]]
        self.is_filled = bool(self._filled)
        """Whether some shares hold more than elements of the message."""
        pieces = zip(self._slot_of, self._pieces, strict=True)
        moved = [slot for slot, numel in pieces if numel]
        self.in_place = not self._filled and moved == sorted(moved)
        """Whether the shares, one behind the other, are the message itself."""

    def ranges(self, share: int) -> tuple[Range, ...]:
        """The ranges of a message that a share holds, one for each tensor.

        Some may be empty.
        """
        return self._ranges[share]

    def cut(self, grad_N: Tensor, into_M: Tensor, *, but: int | None = None) -> None:
        """Writes all shares of a message in turn into ``into_M``, except ``but``."""
        slots = torch.split(into_M, self._slots)
        pieces = torch.split(grad_N, self._pieces)
        kept = [at for at in range(len(pieces)) if at % self.count != but]
        torch._foreach_copy_(
            [slots[self._slot_of[at]] for at in kept], [pieces[at] for at in kept]
        )
        for at in self._filled:
            if at // self._slots_of_share != but:
                slots[at].zero_()

    def join(self, shares: Mapping[int, Tensor], out_N: Tensor) -> None:
        """Writes these shares, by their numbers, into their places in a message."""
        pieces = torch.split(out_N, self._pieces)
        into: list[Tensor] = []
        written: list[Tensor] = []
        for share, own_S in shares.items():
            first = share * self._slots_of_share
            last = first + self._slots_of_share
            slots = torch.split(own_S, self._slots[first:last])
            into += pieces[share :: self.count]
            written += slots[::2]
        torch._foreach_copy_(into, written)

    def clear_filled(self, own_S: Tensor, share: int) -> None:
        """Sets to 0 what lies in a share beside elements of the message."""
        for piece, room in zip(self.ranges(share), self._rooms[share], strict=True):
            own_S[piece.place + piece.numel : piece.place + room] = 0

    def own(self, whole_N: Tensor, share: int) -> Tensor:
        """A new tensor: one share of a message; zeros where it is filled up."""
        own_S = whole_N.new_zeros(self.numels[share])
        for piece in self.ranges(share):
            part_N = whole_N[piece.start : piece.stop]
            own_S[piece.place : piece.place + piece.numel] = part_N
        return own_S

    def put(self, own_S: Tensor, share: int, into_N: Tensor) -> None:
        """Writes one share into its place in a message.

        Other elements stay as they are.
        """
        for piece in self.ranges(share):
            part_S = own_S[piece.place : piece.place + piece.numel]
            into_N[piece.start : piece.stop] = part_S


def _equal_ranges(
    sizes: Sequence[int], parts: Sequence[int], share: int
) -> tuple[Range, ...]:
    """The ranges of a share that holds one of the equal parts of each tensor."""
    ranges = []
    start = 0
    place = 0
    for size, part in zip(sizes, parts, strict=True):
        first = min(share * part, size)
        last = min(first + part, size)
        ranges.append(Range(start + first, start + last, place))
        start += size
        place += part
    return tuple(ranges)


def _whole_ranges(sizes: Sequence[int], tensors: Sequence[int]) -> tuple[Range, ...]:
    """The ranges of a share that holds some tensors whole."""
    ranges = []
    start = 0
    place = 0
    for tensor, size in enumerate(sizes):
        numel = size if tensor in tensors else 0
        ranges.append(Range(start, start + numel, place))
        start += size
        place += numel
    return tuple(ranges)


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
    chosen = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, lightest = bins[0]
        chosen[item] = lightest
        heapq.heapreplace(bins, (load + costs[item], lightest))
    return chosen


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
