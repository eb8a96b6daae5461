"""The scheme for one gradient in one step, from counts that all ranks have told each other.

No profile and no measured cluster is needed: what is known is how many units each rank has, and how
many there were in the last step's mean, which is taken to have as many again. Links are taken for 1
Gbit; a scheme's rank among the others hangs mostly on bytes, and these follow from the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from ..kernels.sparse.entries import num_units
from ..planning.data.cluster import Cluster
from ..planning.data.sparsity import Densification, UnitSparsity
from .sparse_schemes import (
    TIE,
    Prediction,
    Scheme,
    SchemeInputs,
    allgather_sparse_cost,
    sparcml_cost,
    zen_cost,
)

RATE_BYTES_PER_S = 1.25e8
"""1 Gbit: between a slow link, where only bytes count, and a fast one, where only rounds do."""

LOSSLESS: tuple[Scheme, ...] = (allgather_sparse_cost, zen_cost, sparcml_cost)
"""Schemes whose bytes follow from these counts; of those that tie the first is taken."""


@lru_cache(maxsize=64)
def _links(world: int) -> Cluster:
    return Cluster(num_ranks=world, rate_bytes_per_s=RATE_BYTES_PER_S)


def counted(
    counts: Sequence[int], numel: int, width: int, dtype: torch.dtype, growth: float
) -> SchemeInputs:
    """The setting of ranks with so many non-zero units each; the largest count decides.

    ``growth`` is how many times that many units the mean of an earlier step had; 0 where none is
    known, and then ranks are taken to share nothing.
    """
    total, world = num_units(numel, width), len(counts)
    own = max(counts) / total
    ratio = min(max(growth, 1.0), float(world), 1 / own) if growth and own else 0.0
    grown = (Densification(ranks=world, ratio=ratio),) if ratio and world > 1 else ()
    units = UnitSparsity(width=width, num_units=total, density=own, densification=grown)
    return SchemeInputs(numel=numel, units=units, blocks=units, cluster=_links(world), dtype=dtype)


def fastest(at: SchemeInputs, schemes: Sequence[Scheme] = LOSSLESS) -> Prediction:
    """The fastest of these schemes, or the first that ties with it."""
    found = [scheme(at) for scheme in schemes]
    least_s = min(one.seconds for one in found)
    return next(one for one in found if one.seconds <= least_s * (1 + TIE))


def other_way_s(at: SchemeInputs, size_bytes: int) -> float:
    """Seconds of an exchange that is no scheme of these, by the bytes that a rank sends in it."""
    latency_s, _ = at.parts_s(("all_reduce", 1))
    return latency_s + size_bytes / at.cluster.rate_bytes_per_s
