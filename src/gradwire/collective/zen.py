"""Balanced Parallelism (ZEN): every rank serves a part of the units, drawn by a hash.

Source: ZEN (Wang et al., OSDI 2025), definition 6, sections 3.1 to 3.3.
Differences: the hash is a seeded permutation of the units (``sparse/permutation``), so
    that parts are equally large and no rank stores an index set. Push and pull are each
    in the smallest of several formats, by counts that both sides know; among them Elias
    and Fano's code, which the paper does not have. ``formats="paper"`` is its own form:
    push in COO, pull in the smallest of hash bitmap, COO and dense. Entries are merged
    in rank order. ``partition="hash"`` groups units by algorithm 1
    (gradwire-lab's ``kernels/hashing``), and its parts are those of the permutation.
Wire: see ``push_pull``; PUSH(k) and PULL(k) of a part of L places, with v = width *
    itemsize, are the least of v k + ceil(L / 8) (hash bitmap), (4 + v) k (COO), v L
    (dense, pull alone), and v k + ceil(k b / 8) + ceil((k + floor((L - 1) / 2^b)) / 8)
    with b = floor(log2((L - 1) / k)) (``elias_fano``) bytes. A part holds about 1 / W
    of the sent elements: theorem 2, and ``Imbalance``.
State: the codec's.
Contributed: the encoded gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

from ..contract import Member
from ..contract.bounds import MOST_SEED, check_whole
from ..contract.collective import Dimensions
from ..contract.registry import extension
from ..errors import invalid
from ..kernels.sparse.choose import LISTS, OF_PARTS, Formats, smallest
from ..kernels.sparse.entries import Entries, Parts
from ..kernels.sparse.format import SparseFormat
from ..kernels.sparse.formats.coo import coo
from ..kernels.sparse.formats.dense import dense
from ..kernels.sparse.formats.hash_bitmap import hash_bitmap
from ..kernels.sparse.merge import merge_unordered
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
        partition: The way in which a rank groups its elements by the rank that serves
            them. "permutation" (the default) sorts them. "hash" is the paper's
            algorithm 1: k = 3 hash functions into parallel memory of two cells for each
            element, then serial memory of a tenth. gradwire-lab has it. It pushes
            in COO. The mean has the same bits. Where serial memory is full, a
            warning says so, and elements are put into their parts one by one.
    """

    seed: int = 0
    formats: str = "smallest"
    partition: str = "permutation"
    dimensions: ClassVar[Dimensions] = Dimensions(
        "point-to-point", "incremental", "parallelism", "balanced"
    )

    def __post_init__(self) -> None:
        check_whole("zen seed", self.seed, "leave it out", least=0, most=MOST_SEED)
        # a list: what has no hash is refused as well
        if self.formats not in [*FORMATS]:
            accepted = " or ".join(FORMATS)
            raise invalid("zen formats", self.formats, accepted, "leave it out")
        if self.partition not in ["permutation", "hash"]:
            raise invalid(
                "zen partition", self.partition, "permutation or hash", "leave it out"
            )
        if self.partition == "hash":
            _by_hash()

    def permutation(self, num_units: int) -> Permutation | None:
        return Permutation(num_units, self.seed)

    def grouped(self, cut: Cut, units: Entries, room: Entries) -> Parts:
        if self.partition == "permutation":
            return super().grouped(cut, units, room)
        world = len(cut.parts)
        return _by_hash()(units, cut.num_units, world, cut.permutation, room)

    def summed(self, me: Member, cut: Cut, ranks: Sequence[Entries]) -> Entries:
        if self.partition == "permutation":
            return super().summed(me, cut, ranks)
        length = cut.parts[me.rank].length
        return merge_unordered(ranks, length, scale=1 / me.world, dtype=cut.sum_dtype)

    def push_format(self, cut: Cut, server: int, count: int) -> SparseFormat:
        # Other formats need ascending places.
        is_hashed = self.partition == "hash"
        among = FORMATS["coo" if is_hashed else self.formats].push
        length = cut.parts[server].length
        return smallest(among, count, length, cut.width, cut.pushed_dtype)

    def pull_format(self, cut: Cut, rank: int, count: int) -> SparseFormat:
        sent = FORMATS[self.formats]
        length = cut.parts[rank].length
        among = sent.listing if cut.is_listed else sent.pull
        return smallest(among, count, length, cut.width, cut.pulled_dtype)


@cache
def _by_hash() -> Callable[..., Parts]:
    """Algorithm 1; refused where the package that has it is not installed."""
    by_hash: Callable[..., Parts] = extension("hash_partition", "zen(partition='hash')")
    return by_hash


EXAMPLES = (zen(), zen(formats="paper"))
