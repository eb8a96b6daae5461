"""Figures of index sets: how sparse gradients are, where, and how they overlap.

Source: ZEN (OSDI 2025), section 2.1: definitions 1 to 5, figures 2 and 3.

Index sets are 1-D arrays of unit numbers, ascending and without duplicates: one a
gradient. ``gradwire.planning.data.sparsity`` says what a unit is, and how ratios are
extrapolated.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import comb, log2

import numpy as np

from gradwire.planning.data.sparsity import (
    DOUBLINGS,
    HEATMAP_PARTS,
    Densification,
    Indices,
    RangeImbalance,
    Skewness,
    UnitSparsity,
)


def density(indices: Indices, num_units: int) -> float:
    """Definition 1: the fraction of units that are non-zero.

    >>> density(np.array([0, 3]), 8)
    0.25
    """
    return len(indices) / num_units if num_units else 0.0


def overlap_ratio(one: Indices, other: Indices) -> float:
    """Definition 3: what both have, as a fraction of the smaller one; 0 where one is
    empty.

    >>> overlap_ratio(np.array([0, 3, 4]), np.array([3, 7]))
    0.5
    """
    fewer = min(len(one), len(other))
    if not fewer:
        return 0.0
    return len(np.intersect1d(one, other, assume_unique=True)) / fewer


def _appearances(sets: Sequence[Indices]) -> list[int]:
    """How many units are in exactly c of the sets, for c from 0 (which stays 0) to all
    of them.
    """
    _, counts = np.unique(np.concatenate(sets), return_counts=True)
    appearances: list[int] = np.bincount(counts, minlength=len(sets) + 1).tolist()
    return appearances


def _densification(appearances: Sequence[int], num_sets: int, num_ranks: int) -> float:
    """Definition 4: the density of the sum of some gradients over their own mean.

    It is the mean over all subsets of so many of the sets; 1 where all are empty.
    """
    subsets = comb(num_sets, num_ranks)
    # A unit in c of m sets is in none of n chosen ones with probability C(m - c, n) /
    # C(m, n).
    union = sum(
        count * (1 - comb(num_sets - c, num_ranks) / subsets)
        for c, count in enumerate(appearances)
    )
    mean = sum(c * count for c, count in enumerate(appearances)) / num_sets
    return union / mean if mean else 1.0


def skewness_ratio(indices: Indices, num_units: int, num_parts: int) -> float:
    """Definition 5: the largest density of ``num_parts`` even partitions over that of
    the whole.

    Partitions differ by at most one unit; those without any do not count. 1 for an
    empty set.

    >>> skewness_ratio(np.array([0, 1, 2, 7]), 8, 2)
    1.5
    """
    if not len(indices):
        return 1.0
    counts_P, sizes_P = _parts(indices, num_units, num_parts)
    return float(
        (counts_P / np.maximum(sizes_P, 1)).max() / density(indices, num_units)
    )


def partition_shares(indices: Indices, num_units: int, num_parts: int) -> list[float]:
    """The fraction of the non-zero units that lies in each of ``num_parts`` even
    partitions.
    """
    counts_P, _ = _parts(indices, num_units, num_parts)
    shares: list[float] = (counts_P / max(1, len(indices))).tolist()
    return shares


def _parts(indices: Indices, num_units: int, num_parts: int) -> tuple[Indices, Indices]:
    """Non-zero units, and all units, of each partition."""
    edges = np.arange(num_parts + 1) * num_units // num_parts
    return np.diff(np.searchsorted(indices, edges)), np.diff(edges)


def overlap_mean(units: UnitSparsity) -> float:
    """The mean of the overlap ratios; 0 without any."""
    if not units.overlaps:
        return 0.0
    return float(np.mean(units.overlaps))


def overlap_spread(units: UnitSparsity) -> float:
    """The standard deviation of the overlap ratios; 0 without any."""
    if not units.overlaps:
        return 0.0
    return float(np.std(units.overlaps))


def unit_sparsity(
    sets: Sequence[Indices], width: int, num_units: int, *, most_pairs: int = 120
) -> UnitSparsity:
    """All figures of gradients' index sets; the overlaps are of ``most_pairs`` pairs at
    most.
    """
    num_sets = len(sets)
    appearances = _appearances(sets)
    density_ = float(np.mean([density(indices, num_units) for indices in sets]))
    measured = {
        ranks: _densification(appearances, num_sets, ranks)
        for ranks in DOUBLINGS
        if ranks <= num_sets
    }
    pairs = [
        (i, j)
        for step in range(1, num_sets)
        for i, j in enumerate(range(step, num_sets))
    ]
    shares = np.mean(
        [partition_shares(indices, num_units, HEATMAP_PARTS) for indices in sets],
        axis=0,
    )
    return UnitSparsity(
        width=width,
        num_units=num_units,
        density=density_,
        overlaps=tuple(overlap_ratio(sets[i], sets[j]) for i, j in pairs[:most_pairs]),
        densification=tuple(extrapolated(measured, density_)),
        skewness=tuple(
            Skewness(
                parts=parts,
                ratio=float(
                    np.mean(
                        [skewness_ratio(indices, num_units, parts) for indices in sets]
                    )
                ),
            )
            for parts in DOUBLINGS
        ),
        imbalances=tuple(
            _imbalance(sets[:ranks], num_units)
            for ranks in DOUBLINGS
            if ranks <= num_sets
        ),
        shares=tuple(shares.tolist()),
    )


def _imbalance(sets: Sequence[Indices], num_units: int) -> RangeImbalance:
    """The imbalances among the ranks of these sets."""
    all_of_them = np.concatenate(sets)
    push, pull = (
        _uneven(_parts(indices, num_units, len(sets))[0])
        for indices in (np.sort(all_of_them), np.unique(all_of_them))
    )
    return RangeImbalance(ranks=len(sets), push=push, pull=pull)


def _uneven(counts_P: Indices) -> float:
    """The largest over the mean; 1 where there is nothing."""
    if not counts_P.any():
        return 1.0
    return float(counts_P.max() / counts_P.mean())


def extrapolated(measured: dict[int, float], own_density: float) -> list[Densification]:
    """Densification ratios for all of ``DOUBLINGS`` from those measured (at least that
    of 2).

    Without any: none, as one gradient tells nothing of others. For the model see
    ``gradwire.planning.data.sparsity``.

    >>> [round(one.ratio, 2) for one in extrapolated({2: 1.8, 4: 3.0}, 0.01)][:4]
    [1.8, 3.0, 4.63, 6.62]
    """
    entries = [
        Densification(ranks=ranks, ratio=ratio) for ranks, ratio in measured.items()
    ]
    if not entries:
        return entries
    ratios = [1.0, *measured.values()]
    exponents = [log2(after / before) for before, after in pairwise(ratios)]
    earlier = 1.0
    if len(exponents) > 1:
        earlier = exponents[-2]
    fall = earlier - exponents[-1]
    exponent = exponents[-1]
    ratio = ratios[-1]
    most = 1 / own_density if own_density else 1.0
    for ranks in DOUBLINGS[len(entries) :]:
        exponent = max(0.0, exponent - max(0.0, fall))
        ratio = max(ratio, min(ratio * 2**exponent, most))
        entries.append(Densification(ranks=ranks, ratio=ratio, extrapolated=True))
    return entries
