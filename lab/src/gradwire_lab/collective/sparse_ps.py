"""Sparse parameter server: every rank serves a range of the gradient; COO both ways.

Source: Li et al., OSDI 2014, as ZEN (OSDI 2025, appendix B.1) describes it for sparse
gradients.
Differences: servers sit with the workers. Entries are merged in rank order.
Wire: see ``push_pull``; PULL(k) = COO(k). Where most entries lie in one range, its
    server sends and receives most bytes: the skewness ratio times as many as an equal
    share.
State: the codec's.
Contributed: the encoded gradient.
"""

from dataclasses import dataclass
from typing import ClassVar

from gradwire.collective.steps.push_pull import PushPull
from gradwire.contract.collective import Dimensions


@dataclass(frozen=True, kw_only=True)
class sparse_ps(PushPull):
    """Push to the rank that serves an index's range, merge, pull."""

    dimensions: ClassVar[Dimensions] = Dimensions(
        "point-to-point", "incremental", "parallelism", "imbalanced"
    )


EXAMPLES = (sparse_ps(),)
