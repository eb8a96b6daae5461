"""Index sets of W ranks with a given density, overlap and skew; the same on whoever draws them.

Legend: N elements, K indices of one rank, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.errors import invalid
from gradwire.kernels.distinct import count_distinct


@dataclass(frozen=True, kw_only=True)
class IndexDraws:
    """A common pool of K / overlap indices, of which each rank takes K at random.

    So two ranks share ``overlap`` of what they take (ZEN's definition 3). ``skew`` / W of the pool
    lie in the first 1 / W of the vector (the skewness ratio, definition 5), the others anywhere
    behind it; ``run`` adjacent elements, from a multiple of ``run`` on, are taken together.
    """

    numel: int
    world: int
    density: float = 0.01
    overlap: float = 0.3
    skew: float = 5.0
    run: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        _check("density", self.density, 1 / max(1, self.numel), 1.0)
        _check("overlap", self.overlap, self.density, 1.0)
        _check("skew", self.skew, 1.0, self.world)
        _check("run", self.run, 1, max(1, self.numel))
        ends = self._ends()
        for name, share, room in zip(("first", "other"), self._shares(), ends, strict=True):
            if share > room:
                raise invalid(
                    "draws",
                    f"{share} runs in the {name} part, which has {room}",
                    "a pool that fits",
                    "ask for more overlap, or less density or skew",
                )

    def _ends(self) -> tuple[int, int]:
        """How many runs the first 1 / W of the vector has, and the rest."""
        runs = self.numel // self.run
        return runs // self.world, runs - runs // self.world

    @property
    def num_taken(self) -> int:
        """Runs that each rank takes."""
        return max(1, round(self.density * self.numel / self.run))

    def _shares(self) -> tuple[int, int]:
        pool = max(self.num_taken, round(self.num_taken / self.overlap))
        first = round(pool * self.skew / self.world)
        return first, pool - first

    def pool(self) -> Tensor:
        """Numbers of the runs that ranks take from."""
        draw = torch.Generator().manual_seed(self.seed)
        (first, others), (near, far) = self._ends(), self._shares()
        low = torch.randperm(first, generator=draw)[:near]
        high = torch.randperm(others, generator=draw)[:far] + first
        return torch.cat([low, high])

    def taken(self, rank: int, pool: Tensor) -> Tensor:
        """The indices of one rank, int32, ascending."""
        draw = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + rank)
        chosen = torch.randperm(len(pool), generator=draw)[: self.num_taken]
        runs_K = pool[chosen].sort().values * self.run
        return (runs_K[:, None] + torch.arange(self.run)).flatten().int()


@dataclass(frozen=True)
class SetMeasures:
    """Measures of sets that were drawn: definitions 3, 4 and 5 of ZEN."""

    overlap: float
    """The overlap ratio's mean over pairs of neighbours."""
    densification: float
    skewness: float

    @classmethod
    def of(cls, sets: list[Tensor], numel: int) -> SetMeasures:
        """The measures of the index sets of W ranks; skewness is for W parts."""
        world, size = len(sets), min(map(len, sets))
        pairs = [(sets[i], sets[(i + 1) % world]) for i in range(world)]
        shared = [len(a) + len(b) - count_distinct((a, b), numel) for a, b in pairs]
        length = -(-numel // world)
        busiest = [int((s // length).bincount().max()) * world / len(s) for s in sets]
        return cls(
            sum(shared) / world / size,
            count_distinct(sets, numel) / (sum(map(len, sets)) / world),
            sum(busiest) / world,
        )


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise invalid(name, value, f"in [{low:g}, {high:g}]", "see --help for what it means")
