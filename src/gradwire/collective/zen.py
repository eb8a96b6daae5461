"""Balanced Parallelism (ZEN): every rank serves a part of the units, drawn by a hash.

Source: ZEN (Wang et al., OSDI 2025), definition 6, sections 3.1 to 3.3.
Differences: the hash is a seeded permutation of the units (``sparse/permutation``), so
    that parts are equally large and no rank stores an index set. Push and pull are each
    in the smallest of several formats, by counts that both sides know; among them Elias
    and Fano's code, which the paper does not have. ``formats="paper"`` is its own form:
    push in COO, pull in the smallest of hash bitmap, COO and dense. Entries are merged
    in rank order.
Wire: see ``push_pull``; PUSH(k) and PULL(k) of a part of L places, with v = width *
    itemsize, are the least of v k + ceil(L / 8) (hash bitmap), (4 + v) k (COO), v L
    (dense, pull alone), and v k + ceil(k b / 8) + ceil((k + floor((L - 1) / 2^b)) / 8)
    with b = floor(log2((L - 1) / k)) (``elias_fano``) bytes. A part holds about 1 / W
    of the sent elements: theorem 2, and ``Imbalance``.
State: the codec's.
Contributed: the encoded gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..contract.bounds import MOST_SEED, check_whole
from ..contract.collective import Dimensions
from ..errors import invalid
from ..kernels.sparse.choose import LISTS, OF_PARTS, Formats, smallest
from ..kernels.sparse.format import SparseFormat
from ..kernels.sparse.formats.coo import coo
from ..kernels.sparse.formats.dense import dense
from ..kernels.sparse.formats.hash_bitmap import hash_bitmap
from ..kernels.sparse.permutation import Permutation
from .steps.push_pull import Cut, PushPull


class _Sent(NamedTuple):
    """The formats to choose from.

    A push lists its units: units that are zero count as well.
    """

    push: Formats
    pull: Formats

    @property
    def listing(self) -> Formats:
        """The formats of pulls that tell which units there are."""
        return tuple(form for form in self.pull if form in LISTS)


FORMATS = {
    "smallest": _Sent(LISTS, OF_PARTS),
    "paper": _Sent((coo(),), (dense(), coo(), hash_bitmap())),
    "coo": _Sent((coo(),), (coo(),)),
}


@dataclass(frozen=True, kw_only=True)
class zen(PushPull):
    """Push to ranks that a hash names, merge, pull.

    All ranks have the same settings.

    Args:
        seed: The seed of the hash that spreads elements over ranks, from 0 to 2**64 -
            1; default 0. Another seed helps where many elements fall to one rank.
        formats: The formats in which elements travel. "smallest" (the default): the
            shortest of all formats. "paper": push in COO, and pull in the shortest of
            hash bitmap, COO and dense. "coo": an index of 4 bytes and a value for each
            element. It changes bytes, and not the mean.
    """

    seed: int = 0
    formats: str = "smallest"
    dimensions: ClassVar[Dimensions] = Dimensions(
        "point-to-point", "incremental", "parallelism", "balanced"
    )

    def __post_init__(self) -> None:
        check_whole("zen seed", self.seed, "leave it out", least=0, most=MOST_SEED)
        # a list: what has no hash is refused as well
        if self.formats not in [*FORMATS]:
            accepted = " or ".join(FORMATS)
            raise invalid("zen formats", self.formats, accepted, "leave it out")

    def permutation(self, num_units: int) -> Permutation | None:
        return Permutation(num_units, self.seed)

    def push_format(self, cut: Cut, server: int, count: int) -> SparseFormat:
        among = FORMATS[self.formats].push
        length = cut.parts[server].length
        return smallest(among, count, length, cut.width, cut.pushed_dtype)

    def pull_format(self, cut: Cut, rank: int, count: int) -> SparseFormat:
        sent = FORMATS[self.formats]
        length = cut.parts[rank].length
        among = sent.listing if cut.is_listed else sent.pull
        return smallest(among, count, length, cut.width, cut.pulled_dtype)


EXAMPLES = (zen(), zen(formats="paper"))
