"""Fusion of sparsified gradients: cuts after which all arrive earliest.

Source: Wang et al., "Cupcake: A Compression Scheduler for Scalable
    Communication-Efficient Distributed Training" (MLSys 2023), whose cost this is, and
    its ``FindOptFusion``, by which SSFusion (section IV-B) fuses.
Differences from the paper: the programme is exact. Published code looks for one place
    to split at, by halving on measured step times, and stops at the first that gains
    nothing.

Backward pass and encoding share one lane, so with T(b) the seconds of backward up to
tensor b, and N(b) the elements up to it, the lane is free at C(b, y) = T(b) + y B + g
N(b) after y groups that end at b, where the encode of x elements takes B + g x. That is
the same wherever the y - 1 earlier cuts are. So the second at which the y-th group has
travelled,

    E(b, y) = min over a < b of max(E(a, y - 1), C(b, y)) + G(N(b) - N(a)),

is a dynamic programme over b and y, with G the all-gather of what x elements become. It
compares as many splits as there are pairs of tensors for each number of groups, and
ends as soon as no larger number can gain: 400 tensors take 10 to 600 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gradwire.collective.steps.shares import pack
from gradwire.contract import Compressor, Layout
from gradwire.contract.bounds import check_share
from gradwire.contract.registry import names
from gradwire.errors import UnknownName, invalid
from gradwire.exchange.by_name import algorithm_by_name
from gradwire.exchange.sparse_schemes import TIE
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.fit import Floats, LineFit
from gradwire.planning.data.plan import Chunk, ExchangeSetting
from gradwire.planning.data.profile import Profile, ProfiledTensor

from .curves import measured_each

ENTRY_BYTES = 8
"""Bytes of one sparse element on the wire: an int32 index and a float32."""
SIZE_BYTES = 8
"""Bytes of the announced size of a payload."""
MOST_ELEMENTS = 2**31 - 1
"""The most elements that are sparsified together, as an int32 tells each place."""


class Arrival(NamedTuple):
    """A tensor whose gradient the backward pass computes, in the pass's order."""

    tensor: ProfiledTensor
    backward_s: float
    """Seconds of backward before this gradient and after the one before it. The tensors
    of a layer become ready together: the first of them has all of the layer's time.
    """


def arrivals(profile: Profile) -> list[Arrival]:
    """All tensors that hold elements, in backward order.

    The time of layers without gradients counts for the next tensor. Time after the last
    gradient is in none: nothing that is sent waits for it.
    """
    ready = []
    waited_s = 0.0
    for layer in reversed(profile.layers):
        waited_s += layer.backward_s
        for tensor in reversed(layer.tensors):
            if tensor.numel:
                ready.append(Arrival(tensor, waited_s))
                waited_s = 0.0
    return ready


NOTHING = LineFit(alpha_s=0.0, per_unit_s=0.0)
"""The line of what nobody measured."""


@dataclass(frozen=True)
class SparseCost:
    """The seconds that a sparsified gradient costs on one cluster.

    ``encode`` is the line of the codec's encode over elements where it holds up the
    backward pass; ``gather`` that of an all-gather over the bytes of one rank. Hosts of
    several ranks add up first, and encode their sums between two transfers:
    ``on_hosts`` has the seconds of both.
    """

    density: float
    encode: LineFit
    gather: LineFit
    announced_s: float
    """Seconds in which ranks announce the sizes of their payloads first."""
    num_shares: int = 1
    """The ranks of a host; each encodes and gathers an equal share."""
    on_hosts: LineFit = NOTHING
    """Seconds of a message beside its all-gather, by elements of a share of float32.

    They are transfers within the host and the encode; nothing where each rank is a
    host.
    """

    @classmethod
    def of(cls, cluster: Cluster, compressor: str, density: float) -> SparseCost:
        """The cost of a sparsifier by its measured line.

        One that the cluster has not measured counts as free, as in the simulator.
        Raises ``InvalidSetting`` for a compressor that is no sparsifier of a given
        density.
        """
        check_share("density", density)
        made = sparsifier(compressor, density)
        count = cluster.ranks_per_host
        within = cluster.within_line
        on_hosts = NOTHING
        if count > 1:
            codec = cluster.codecs.get(compressor)
            encode = NOTHING
            if codec is not None:
                encode = codec.encode
            on_hosts = LineFit(
                alpha_s=within.alpha_s + encode.alpha_s,
                per_unit_s=4 * count * within.per_unit_s + encode.per_unit_s,
            )
        gather = cluster.shares.line("all_gather")
        is_exact = made.traits.exact_size
        return cls(
            density=density,
            encode=cluster.inline_line(compressor) or NOTHING,
            gather=gather,
            announced_s=0.0 if is_exact else gather.measured_s(SIZE_BYTES),
            num_shares=count,
            on_hosts=on_hosts,
        )

    def encode_s(self, numel: float) -> float:
        """Seconds of the encode of so many elements at once."""
        return self.encode.seconds(numel)

    def entries(self, numel: int) -> int:
        """Elements that are sent of so many: at least one."""
        return max(1, round(self.density * numel))

    def sent_bytes(self, numel: int) -> int:
        """Bytes of the entries of so many elements."""
        return ENTRY_BYTES * self.entries(numel)

    def gather_s(self, numel: int) -> float:
        """Seconds of a message of so many elements, sparsified as one, from its first
        transfer on: of its all-gather, and of ``on_hosts``.
        """
        share = -(-numel // self.num_shares)
        gathered_s = self.gather_bytes_s(self.sent_bytes(share))
        return self.on_hosts.seconds(share) + gathered_s

    def gather_bytes_s(self, size_bytes: float) -> float:
        """Seconds of the all-gather of a rank's payload, and of the sizes before."""
        return self.announced_s + self.gather.measured_s(size_bytes)

    def apart_s(self, numels: Sequence[int], payload_bytes: float) -> float:
        """Seconds of a message of tensors, each sparsified by itself, as ``gather_s``.

        ``payload_bytes`` are of all tensors; the ranks of a host share them.
        """
        on_hosts_s = self.on_hosts.seconds(self.longest(numels))
        return on_hosts_s + self.gather_bytes_s(payload_bytes / self.num_shares)

    def longest(self, numels: Sequence[int]) -> int:
        """The most elements of a host's rank, each having some tensors whole."""
        filled = [0] * self.num_shares
        for numel, rank in zip(numels, pack(numels, self.num_shares), strict=True):
            filled[rank] += numel
        return max(filled)

    def gather_each_s(self, numels: Floats, longest: float | Floats = 0.0) -> Floats:
        """``gather_s`` of many numbers of elements at once, one or more each.

        ``longest`` elements stay on one rank of a host.
        """
        shares = np.ceil(numels / self.num_shares)
        size_bytes = ENTRY_BYTES * np.maximum(1.0, np.rint(self.density * shares))
        largest = np.maximum(shares, longest)
        on_hosts = self.on_hosts.alpha_s + self.on_hosts.per_unit_s * largest
        return on_hosts + (self.announced_s + measured_each(self.gather, size_bytes))


def sparsifier(compressor: str, density: float) -> Compressor:
    """The sparsifier of a name at a density.

    Refuses what sends no share of the elements.
    """
    what = "compressor (sparsifier)"
    if compressor not in names("compress"):
        raise UnknownName(what, compressor, names("compress"))
    made = algorithm_by_name(compressor, {"density": density})
    if not isinstance(made, Compressor) or made.traits.layout is not Layout.SPARSE:
        accepted = "a compressor with a density, such as 'dgc' or 'topk'"
        raise invalid(what, compressor, accepted, "see gradwire list compressor")
    return made


def sparsified(
    compressor: str, density: float, collective: str = "allgather_sparse"
) -> ExchangeSetting:
    """The exchange of a sparsifier of a name at a density."""
    codec = sparsifier(compressor, density)
    return ExchangeSetting(
        compressor=compressor,
        settings={"density": density},
        collective=collective,
        error_feedback=codec.traits.error_feedback,
    )


def is_too_long(group: Iterable[Arrival]) -> bool:
    """Whether a group is too large to be sparsified together, so travels dense."""
    return sum(tensor.numel for tensor, _ in group) > MOST_ELEMENTS


def chunks_in(group: Iterable[Arrival]) -> tuple[Chunk, ...]:
    """The whole tensors of a group, as a message carries them."""
    return tuple(
        Chunk(tensor=tensor.name, start=0, stop=tensor.numel) for tensor, _ in group
    )


def best_fusion(
    every: Sequence[Arrival], cost: SparseCost, *, is_whole: bool = False
) -> list[list[Arrival]]:
    """The groups, in backward order, after which the last one arrives earliest.

    If tensors stay whole, each rank of a host has some of a group's, and not a part of
    each.

    Among numbers of groups that tie (within ``TIE``) it is the smallest. A group holds
    one dtype, and no more than ``MOST_ELEMENTS`` unless it is one tensor.
    """
    if not every:
        return []
    cuts = _cuts(_Table.of(every, cost, is_whole and cost.num_shares > 1))
    return [list(every[start:stop]) for start, stop in pairwise(cuts)]


@dataclass(frozen=True)
class _Table:
    """Figures of all prefixes (0 to L) of L tensors, and of all groups ``a:b``."""

    lane_B: Floats
    """Lane seconds up to each prefix, without the fixed cost of each group."""
    group_s: float
    gather_AB: Floats
    """Seconds of the all-gather of tensors a to b - 1.

    Infinite where there is no such group.
    """

    @classmethod
    def of(cls, every: Sequence[Arrival], cost: SparseCost, is_whole: bool) -> _Table:
        backward_s = [arrival.backward_s for arrival in every]
        numels = [arrival.tensor.numel for arrival in every]
        encode_s = [cost.encode.per_unit_s * n for n in numels]
        lane_B = _prefixes(np.add(backward_s, encode_s))
        upto_B = _prefixes(numels)
        longest_AB = np.zeros((len(upto_B), len(upto_B)))
        for start in range(len(numels) if is_whole else 0):
            longest_AB[start, start + 1 :] = np.maximum.accumulate(numels[start:])
        numel_AB = upto_B - upto_B[:, None]
        gather_AB = cost.gather_each_s(np.maximum(numel_AB, 1.0), longest_AB)
        place_B = np.arange(len(upto_B))
        num_tensors_AB = place_B - place_B[:, None]
        gather_AB[num_tensors_AB <= 0] = np.inf
        # One tensor cannot be cut, and travels dense if it is longer.
        is_several_AB = num_tensors_AB > 1
        is_too_long_AB = is_several_AB & (numel_AB > MOST_ELEMENTS)
        gather_AB[is_too_long_AB] = np.inf
        for border, (before, after) in enumerate(pairwise(every), 1):
            if before.tensor.dtype != after.tensor.dtype:
                gather_AB[:border, border + 1 :] = np.inf
        return cls(lane_B, cost.encode.alpha_s, gather_AB)


def _prefixes(figures: Any) -> Floats:
    sums: Floats = np.concatenate([[0.0], np.cumsum(figures, dtype=np.float64)])
    return sums


def _cuts(table: _Table) -> list[int]:
    """Places at which the best groups begin and end, from 0 to the tensors' number."""
    last = len(table.lane_B) - 1
    end_B = np.full(last + 1, np.inf)
    end_B[0] = 0.0
    ends_s = []
    chosen = []
    least_gather_s = float(table.gather_AB.min())
    last_gather_s = float(table.gather_AB[:, last].min())
    best_s = np.inf
    for count in range(1, last + 1):
        # No number of groups from here on can end before the earlier of these two.
        lane_B = table.lane_B + count * table.group_s
        lane_s = lane_B[last] + last_gather_s
        link_s = table.lane_B[1] + table.group_s + count * least_gather_s
        if max(lane_s, link_s) >= best_s:
            break
        start_AB = np.maximum(end_B[:, None], lane_B)
        ends_AB = start_AB + table.gather_AB
        from_B = ends_AB.argmin(axis=0)
        end_B = ends_AB[from_B, np.arange(last + 1)]
        ends_s.append(float(end_B[last]))
        chosen.append(from_B)
        best_s = min(best_s, ends_s[-1])
    fewest = next(
        place for place, end_s in enumerate(ends_s) if end_s <= best_s * (1 + TIE)
    )
    cuts = [last]
    for from_B in reversed(chosen[: fewest + 1]):
        cuts.append(int(from_B[cuts[-1]]))
    return cuts[::-1]
