"""Orders of priority for the first phase: US-Byte's algorithm 2, and a climb from it.

Source: US-Byte, algorithm 2 and equation 13.
Differences from the paper: the climb, as algorithm 2 alone is sometimes well behind the best order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from .phases import Instance, UnequalBlock

MOST_TRIALS = 10_000
"""The most orders that a search may price; a hundred take a second or more for large models."""


@dataclass(frozen=True)
class PricedOrder:
    """Priorities (a place for each bucket, the smallest is the most urgent) and their blocks."""

    place: list[int]
    blocks: list[UnequalBlock]
    iteration_s: float

    @classmethod
    def of(cls, instance: Instance, place: list[int]) -> PricedOrder:
        blocks = instance.blocks(place)
        return cls(place, blocks, instance.iteration_s(blocks))


def greedy(instance: Instance) -> PricedOrder:
    """Algorithm 2: from the last layer to the first, a higher priority is kept if it helps."""
    found = PricedOrder.of(instance, list(range(len(instance.layer))))
    raised = len(found.place) - 1
    while raised > 0:
        above = _raise_to(instance, found.blocks, raised)
        if above < raised:
            trial = found.place[:]
            trial[raised] = trial[above]
            trial[above:raised] = [place + 1 for place in trial[above:raised]]
            other = PricedOrder.of(instance, trial)
            if other.iteration_s < found.iteration_s:
                found, raised = other, above
        raised -= 1
    return found


def _raise_to(instance: Instance, blocks: list[UnequalBlock], raised: int) -> int:
    """The first bucket that is ready while ``raised`` would be sent whole (equation 13)."""
    backward_s = instance.layer_ends_s[0]
    start_s = next(block.start_s for block in blocks if block.bucket == raised)
    if start_s >= backward_s:
        return raised
    end_s = start_s + instance.alpha_s + instance.beta_s_per_byte * instance.size_bytes[raised]
    above = raised
    while above > 0 and instance.layer_ends_s[instance.layer[above - 1]] < end_s:
        above -= 1
    return above


def search(instance: Instance, trials: int) -> list[UnequalBlock]:
    """The blocks of algorithm 2's priorities, or of better ones found by climbing.

    At most ``trials`` orders are tried; 0 is algorithm 2 alone.
    """
    found = greedy(instance)
    if trials:
        forward = list(range(len(found.place)))
        tried: set[tuple[int, ...]] = set()
        starts = [found, *(PricedOrder.of(instance, place) for place in (forward[::-1], forward))]
        ends = [_climb(instance, start, trials, tried) for start in starts]
        found = min(ends, key=lambda end: end.iteration_s)
    return found.blocks


def _climb(
    instance: Instance, found: PricedOrder, trials: int, tried: set[tuple[int, ...]]
) -> PricedOrder:
    """Goes from priorities to better neighbours until there are none, or all trials are spent.

    ``tried`` is shared among climbs: orders that another climb saw are no better than its end.
    """
    draw = random.Random(0)  # any order of neighbours will do, but the same one on every rank
    better: PricedOrder | None = found
    while better is not None:
        found, better = better, None
        for place in _neighbours(found.place, draw, trials):
            if len(tried) >= trials:
                return found
            if tuple(place) in tried:
                continue
            tried.add(tuple(place))
            other = PricedOrder.of(instance, place)
            if other.iteration_s < found.iteration_s:
                better = other
                break
    return found


def _neighbours(place: list[int], draw: random.Random, most: int) -> Iterator[list[int]]:
    """Priorities in which one bucket stands elsewhere: ``most`` of them, each drawn once."""
    size = len(place)
    order = sorted(range(size), key=place.__getitem__)
    for move in draw.sample(range(size * size), min(most, size * size)):
        source, target = divmod(move, size)
        if source != target:
            moved = order[:]
            moved.insert(target, moved.pop(source))
            elsewhere = [0] * size
            for spot, bucket in enumerate(moved):
                elsewhere[bucket] = spot
            yield elsewhere
