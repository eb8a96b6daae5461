"""Balanced Parallelism (ZEN): every rank serves a part of the units, drawn by a hash.

Source: ZEN (Wang et al., OSDI 2025), definition 6, sections 3.1 to 3.3.
Differences: the hash is a seeded permutation of the units (``sparse/permutation``), so that parts
    are equally large and no rank stores an index set. Push is COO, as there; each rank's pull is
    the smallest of hash bitmap, COO and dense, from counts that all ranks know. Entries are merged
    in rank order.
Wire: see ``_push_pull``; PULL(k) of a part of L places, with v = width * itemsize, is the least of
    v k + ceil(L / 8) (hash bitmap), (4 + v) k (COO) and v L (dense) bytes. A part holds about 1 / W
    of what is taken: theorem 2, and ``Imbalance``.
State: the codec's.
Contributed: what the codec encoded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..errors import invalid
from ..sparse.choose import choose
from ..sparse.formats._types import SparseFormat
from ..sparse.permutation import Permutation
from ._push_pull import Cut, PushPull
from ._types import Dimensions


@dataclass(frozen=True, kw_only=True)
class zen(PushPull):
    """Push to ranks that a hash names, merge, pull in the smallest format.

    ``seed`` numbers the hash; all ranks have the same.
    """

    seed: int = 0
    dimensions: ClassVar[Dimensions] = Dimensions(
        "point-to-point", "incremental", "parallelism", "balanced"
    )

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise invalid("zen seed", self.seed, "a whole number, 0 or more", "leave it out")

    def permutation(self, num_units: int) -> Permutation | None:
        return Permutation(num_units, self.seed)

    def pull_format(self, cut: Cut, rank: int, count: int) -> SparseFormat:
        return choose(count, cut.parts[rank].length, cut.width, cut.pulled_dtype).format


def imbalance_bound(world: int, num_taken: int) -> float:
    """Theorem 2 with its constant: imbalance stays below this with probability 1 - 1 / W.

    Of sets of ``num_taken`` units, or a union of so many, that were chosen without knowledge of the
    seed. By Chernoff's bound a part gets (1 + d) of its share with probability at most
    exp(-d^2 K / 3 W) for d <= 1, and the W^2 pairs of a worker and a part all stay below with
    d = 3 sqrt(W ln W / K). The theorem's Theta hides the 3. Needs K >= 9 W ln W, where d is 1.
    """
    return 1 + 3 * math.sqrt(world * math.log(world) / num_taken)


EXAMPLES = (zen(),)
