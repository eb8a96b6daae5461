"""Index sets of W ranks with a given density, overlap and skew; the same on whoever
draws them.

Legend: N elements, K indices of one rank, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.contract.bounds import check_number
from gradwire.errors import invalid
from gradwire.kernels.distinct import count_distinct
from gradwire.planning.data.sparsity import DOUBLINGS, Skewness, UnitSparsity
from gradwire_bench.checks import check_names
from gradwire_lab.exchange.sparse_schemes import skew
from gradwire_lab.planning.index_sets import overlap_mean


@dataclass(frozen=True, kw_only=True)
class IndexDraws:
    """A common pool of K / overlap indices, of which each rank takes K at random.

    So two ranks share ``overlap`` of what they take (ZEN's definition 3). ``skew`` / W
    of the pool lie in the first 1 / W of the vector (the skewness ratio, definition 5),
    the others anywhere behind it; ``run`` adjacent elements, from a multiple of ``run``
    on, are taken together.
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
        for name, share, room in zip(
            ("first", "other"), self._shares(), ends, strict=True
        ):
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
        (first, others) = self._ends()
        (near, far) = self._shares()
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
        world = len(sets)
        size = min(map(len, sets))
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
    accepted = f"in [{low:g}, {high:g}]"
    check_number(name, value, accepted, "see --help for what it means", low, high)


# ---- Index sets that are like those of real models -----------------------------------
#
# What ``gradwire reproduce zen`` measured of them.
#
# Its captures of 128 ranks on CPU, torch 2.13 (figures 2 and 3; it keeps them as
# ``sparsity-<model>.json``). Drawn sets share one pool, so they are as dense, as much
# alike in pairs and as skewed; real ones thin out more slowly, and so become denser
# among many ranks: 4.9 times instead of 3.1 times among 8 of the LSTM's.


def _sparsity(
    width: int, num_units: int, density: float, overlap: float, *skewness: float
) -> UnitSparsity:
    pairs = zip(DOUBLINGS, skewness, strict=True)
    return UnitSparsity(
        width=width,
        num_units=num_units,
        density=density,
        overlaps=(overlap,),
        skewness=tuple(Skewness(parts=parts, ratio=ratio) for parts, ratio in pairs),
    )


LIKENESSES = {
    "lstm": _sparsity(
        128, 20_000, 0.0112, 0.299, 1.89, 3.52, 6.4, 11.37, 19.3, 31.63, 48.67
    ),
    "deepfm": _sparsity(
        32, 55_934, 0.0307, 0.299, 1.73, 2.49, 4.04, 7.32, 11.81, 12.07, 14.8
    ),
    "transformer": _sparsity(
        1, 2_538_280, 0.049, 0.394, 1.3, 2.35, 2.49, 3.6, 4.97, 6.43, 9.45
    ),
}
"""Sparsity by model: the embedding's gradient of an LSTM language model and of a
DeepFM, in rows, and the elements that DGC selects at 5 % of a transformer's.
"""


def draws_like(
    model: str, numel: int, world: int, *, density: float | None = None
) -> IndexDraws:
    """Sets of ``numel`` elements with a model's overlap, skew, runs and, unless given,
    density.

    Raises ``UnknownName`` for another model.

    >>> draws_like("lstm", 1_000_000, 8).skew
    6.4
    """
    check_names("model", [model], LIKENESSES)
    likeness = LIKENESSES[model]
    return IndexDraws(
        numel=numel,
        world=world,
        density=likeness.density if density is None else density,
        overlap=overlap_mean(likeness),
        skew=skew(likeness, world),
        run=likeness.width,
    )
