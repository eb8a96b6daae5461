"""The cheapest settings of several tensors that lose no more than is allowed: L-GreCo's
programme.

Everything here is a pure function of figures that all ranks share.
"""

import math
from collections.abc import Sequence

import torch

UNITS = 4096
"""The fewest units that the loss allowed is counted in."""
UNITS_PER_TENSOR = 64
"""Units for each tensor: rounding up, all tensors together give away a 64th of the
allowance.
"""
_NEVER = 2**60


def chosen(
    bytes_TL: Sequence[Sequence[int]],
    lost_TL: Sequence[Sequence[float]],
    allowed: float,
) -> tuple[int, ...]:
    """The rung of each tensor: fewest bytes in all whose losses add up to no more than
    ``allowed``.

    Where no rungs lose as little, each tensor has that of its least loss, the cheapest
    of these.

    >>> chosen([[1, 4], [1, 8]], [[3.0, 1.0], [3.0, 1.0]], allowed=4.0)
    (1, 0)
    >>> chosen([[1, 4], [1, 8]], [[3.0, 1.0], [3.0, 1.0]], allowed=0.5)
    (1, 1)
    """
    most = max(UNITS, UNITS_PER_TENSOR * len(bytes_TL))
    units_TL = [
        [
            math.ceil(min(most + 1, lost / allowed * most))
            if allowed
            else int(lost > 0) * (most + 1)
            for lost in row
        ]
        for row in lost_TL
    ]
    choice = cheapest(bytes_TL, units_TL, most)
    if choice is not None:
        return choice
    rungs = []
    for losts, sizes in zip(lost_TL, bytes_TL, strict=True):
        pairs = list(zip(losts, sizes, strict=True))
        least = min(pairs)
        rungs.append(pairs.index(least))
    return tuple(rungs)


def total(values_TL: Sequence[Sequence[float]], rungs: Sequence[int]) -> float:
    """The sum of values at the rungs of each tensor, the same bits in whatever
    order.
    """
    return math.fsum(row[rung] for row, rung in zip(values_TL, rungs, strict=True))


def cheapest(
    bytes_TL: Sequence[Sequence[int]], units_TL: Sequence[Sequence[int]], most: int
) -> tuple[int, ...] | None:
    """The rung of each tensor, of fewest bytes in all with no more than ``most`` units
    in all.

    Exact, by dynamic programming over the units; None where no rungs have as few.

    >>> cheapest([[1, 4], [1, 8]], [[3, 1], [3, 1]], most=4)
    (1, 0)
    >>> cheapest([[1]], [[5]], most=4) is None
    True
    """
    best_U = torch.zeros(most + 1, dtype=torch.int64, device="cpu")
    """The fewest bytes of the tensors so far for each number of units, at most."""
    picks = []
    for sizes, units in zip(bytes_TL, units_TL, strict=True):
        tried_LU = torch.full((len(sizes), most + 1), _NEVER, device="cpu")
        for rung, (size_bytes, used) in enumerate(zip(sizes, units, strict=True)):
            if used <= most:
                rest_U = best_U[: most + 1 - used]
                tried_LU[rung, used:] = rest_U + size_bytes
        best_U, pick_U = tried_LU.min(0)
        picks.append(pick_U.to(torch.int16))  # of many layers they are the most memory
    if int(best_U[most]) >= _NEVER:
        return None
    left = most
    rungs = []
    for pick_U, units in zip(reversed(picks), reversed(units_TL), strict=True):
        rung = int(pick_U[left])
        rungs.append(rung)
        left -= units[rung]
    return tuple(reversed(rungs))
