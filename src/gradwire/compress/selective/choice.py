"""Choice: which tensors of a message travel dense, and what density is left to the others.

Source: SSFusion (ICDE 2026), section IV-B: exclude from the smallest tensor on, and "decrease the
sparsification density of large tensors to compensate", not below a floor. ``selective`` says where
this differs from the paper.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

SMALL = 102_400
"""The most elements of a tensor that is left dense of itself: the paper's section III-B."""


class Choice(NamedTuple):
    """How a message's tensors travel; the same on all ranks, as it follows from their sizes."""

    dense: tuple[int, ...]
    """Places in the message of the tensors that travel whole, ascending."""
    sparse: tuple[int, ...]
    """Places of the others, ascending; tensors without elements are in neither."""
    density: float
    """The share that is sent of each of ``sparse``."""


@lru_cache(maxsize=4096)
def choose(
    sizes: tuple[int, ...],
    density: float,
    floor: float,
    num_dense: int | None = None,
    *,
    dense_cost: float = 1.0,
) -> Choice:
    """The choice for tensors of ``sizes`` elements.

    ``num_dense`` of them, the smallest, are dense, and ``density`` is that of the others; so it is
    where a plan has chosen. With None the smallest are dense as long as they have no more than
    ``SMALL`` elements and the others can make up for them: about ``density`` of all elements
    travel, a dense one counted as ``dense_cost`` of one, and the density of the others stays at
    ``floor`` or above. One tensor stays sparse then. Of equally large tensors the first counts as
    the smaller.

    >>> choose((20, 1000, 10), density=0.05, floor=0.001)
    Choice(dense=(0, 2), sparse=(1,), density=0.0215)
    >>> choose((20, 1000, 10), density=0.05, floor=0.001, dense_cost=0.5)
    Choice(dense=(0, 2), sparse=(1,), density=0.0365)
    >>> choose((20, 1000, 10), density=0.05, floor=0.03)
    Choice(dense=(2,), sparse=(0, 1), density=0.04068627450980392)
    >>> choose((20, 1000, 10), density=0.05, floor=0.001, num_dense=1)
    Choice(dense=(2,), sparse=(0, 1), density=0.05)
    """
    rising = sorted((place for place, size in enumerate(sizes) if size), key=lambda p: sizes[p])
    if num_dense is None:
        sorted_sizes = [sizes[place] for place in rising]
        num_dense, density = _compensated(sorted_sizes, density, floor, dense_cost)
    dense, sparse = rising[:num_dense], rising[num_dense:]
    return Choice(tuple(sorted(dense)), tuple(sorted(sparse)), density)


def _compensated(
    rising: list[int], density: float, floor: float, dense_cost: float
) -> tuple[int, float]:
    """How many of the smallest are dense, and the density that is left to the others."""
    least, total = min(floor, density), sum(rising)
    excluded, found = 0, (0, density)
    for count, size in enumerate(rising[:-1], start=1):
        excluded += size
        left = (density * total - dense_cost * excluded) / (total - excluded)
        if size > SMALL or left < least:
            break
        found = (count, min(left, density))
    return found
