"""Spread: which sums move between ranks so that each sends equally many to all others.

Source: Ok-Topk (PPoPP 2022), section 3.1.2, balance and allgatherv: sums are evened out
    only where the rank with the most has more than four times the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Spread:
    """The sums of all ranks, numbered in index order: those that each rank has, and
    will have.

    Both are W + 1 ascending numbers, of which two neighbours bound a rank's sums.
    """

    has: tuple[int, ...]
    gets: tuple[int, ...]

    @classmethod
    def of(cls, counts: Sequence[int], most_uneven: float) -> Spread:
        """Nothing moves unless the most of ``counts`` is above ``most_uneven`` times
        their mean.

        >>> Spread.of([9, 0, 0], 4.0).is_even, Spread.of([9, 0, 0], 2.0).gets
        (True, (0, 3, 6, 9))
        """
        has = tuple(accumulate(counts, initial=0))
        world = len(counts)
        if max(counts) * world <= most_uneven * has[-1]:
            return cls(has, has)
        return cls(has, tuple(has[-1] * rank // world for rank in range(world + 1)))

    @property
    def is_even(self) -> bool:
        """Whether every rank keeps its sums."""
        return self.has == self.gets

    def piece(self, source: int, target: int) -> slice:
        """The sums that go from one rank to another, counted from the first of the
        source's.
        """
        first = self.has[source]
        last = self.has[source + 1]
        start = max(first, self.gets[target])
        return slice(
            start - first, max(start, min(last, self.gets[target + 1])) - first
        )

    def moved(self, source: int, target: int) -> int:
        """How many sums go from one rank to another; what a rank keeps does not."""
        piece = self.piece(source, target)
        return 0 if source == target else piece.stop - piece.start

    def count(self, rank: int) -> int:
        """How many sums a rank has in the end."""
        return self.gets[rank + 1] - self.gets[rank]
