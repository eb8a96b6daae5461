"""Deliberately wrong fusions, each wrong in the one thing its name says."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.planning.fusion import Arrival, SparseCost, best_fusion
from tests.laws import fusion_laws as laws
from tests.laws.fusion_laws import Groups, last_s


def greedy(every: Sequence[Arrival], cost: SparseCost) -> Groups:
    """Closes a group as soon as that alone ends earlier; what comes after it is not looked at."""
    groups: Groups = []
    for one in every:
        apart = [*groups, [one]]
        merged = [*groups[:-1], [*groups[-1], one]] if groups else apart
        groups = merged if last_s(merged, cost) <= last_s(apart, cost) else apart
    return groups


def halves(every: Sequence[Arrival], cost: SparseCost) -> Groups:
    """One split at most, as published code looks for."""
    splits = [[list(every)], *([list(every[:i]), list(every[i:])] for i in range(1, len(every)))]
    return min(splits, key=lambda groups: last_s(groups, cost))


def each_alone(every: Sequence[Arrival], cost: SparseCost) -> Groups:
    return [[one] for one in every]


def loses_the_last(every: Sequence[Arrival], cost: SparseCost) -> Groups:
    return best_fusion(every[:-1], cost)


def mixes_dtypes(every: Sequence[Arrival], cost: SparseCost) -> Groups:
    return [list(every)]


BITES = (
    (laws.law_no_fusion_ends_earlier, greedy),
    (laws.law_no_fusion_ends_earlier, halves),
    (laws.law_no_fusion_ends_earlier, each_alone),
    (laws.law_groups_are_the_arrivals, loses_the_last),
    (laws.law_groups_are_the_arrivals, mixes_dtypes),
)
