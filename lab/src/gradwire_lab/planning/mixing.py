"""Fusion of gradients that travel in different ways: dense, or sparsified here or
there.

A group is neighbours in backward order. Its dense tensors travel by an all-reduce, and
the others behind it by an all-gather: each sparsified by itself, within the backward
pass or on the compute lane as it comes, or the whole group as one vector. ``MixedCost``
says what groups cost, and ``improved`` changes groups for as long as the clock of
``lanes.py`` gains by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from math import inf
from typing import NamedTuple

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import ExchangeSetting
from gradwire.planning.data.profile import Profile, ProfiledTensor

from .lanes import (
    BackwardOrder,
    TimedMessage,
    backward_order,
    carry_s,
    end_of,
    ready_times,
)
from .sparse_fusion import MOST_ELEMENTS, NOTHING, SparseCost


class Way(IntEnum):
    """The way of one tensor; all tensors of a group that is sparsified as one have the
    same.
    """

    DENSE = 0
    EARLY = 1
    """Sparsified by itself on the compute lane, as soon as it is there."""
    INLINE = 2
    """Sparsified by itself within the backward pass."""
    ONE_INLINE = 3
    """Sparsified with its whole group, within the backward pass."""
    ONE_AT_LAUNCH = 4
    """Sparsified with its whole group, on the compute lane when the last of it is
    there.
    """


WHOLE = (Way.ONE_INLINE, Way.ONE_AT_LAUNCH)


def whole_ways(num_tensors: int, as_one: bool) -> tuple[Way, ...]:
    """The ways of a group as one vector; of several tensors only if ``as_one``."""
    return WHOLE if as_one or num_tensors == 1 else ()


class MixedGroup(NamedTuple):
    """Tensors ``start`` up to, not including, ``stop`` in backward order, and the way
    of each.
    """

    start: int
    stop: int
    ways: tuple[Way, ...]

    def places(self, *ways: Way) -> list[int]:
        """The places of the tensors that go in one of these ways."""
        return [place for place, way in enumerate(self.ways, self.start) if way in ways]


class TimedGroup(NamedTuple):
    """The encodes of one group within the backward pass, and its messages."""

    inline: tuple[tuple[int, float], ...]
    """Seconds of encodes behind each layer that has any, layers in backward order."""
    messages: tuple[TimedMessage, ...]


class TensorCost(NamedTuple):
    """One tensor's elements, its bytes dense and sparsified, and the seconds of both
    encodes.
    """

    numel: int
    size_bytes: int
    sent_bytes: int
    inline_s: float
    beside_s: float


@dataclass
class MixedCost(BackwardOrder):
    """The seconds that groups of one model take on one cluster. Letters: L tensors, K
    layers.
    """

    cluster: Cluster
    sparse: SparseCost
    beside: LineFit
    """The encode on the compute lane, over elements."""
    apart_behind: LineFit
    """Computations behind the all-gather of tensors sparsified apart, over their
    elements.
    """
    one_behind: LineFit
    """Computations behind the all-gather of a group that was sparsified as one."""
    costs: list[TensorCost] = field(init=False)
    """The cost of each tensor."""
    _known: dict[MixedGroup, TimedGroup] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.costs = [
            TensorCost(
                numel=tensor.numel,
                size_bytes=tensor.size_bytes,
                sent_bytes=self.sparse.sent_bytes(tensor.numel),
                inline_s=self.sparse.encode_s(tensor.numel),
                beside_s=self.beside.seconds(tensor.numel),
            )
            for tensor in self.tensors
        ]

    @property
    def is_flat(self) -> bool:
        """Whether each rank is a host. Others encode between transfers, as a part of a
        message.
        """
        return self.sparse.num_shares == 1

    @classmethod
    def of(
        cls,
        profile: Profile,
        cluster: Cluster,
        apart: ExchangeSetting,
        setting: ExchangeSetting,
        density: float,
    ) -> MixedCost:
        """The cost for exchanges of sparsified tensors: each by itself, and all as
        one.
        """
        order = backward_order(profile)
        sparse = SparseCost.of(cluster, setting.compressor, density)
        codec = cluster.codecs.get(setting.compressor)
        return cls(
            tensors=order.tensors,
            layers=order.layers,
            backward_s=order.backward_s,
            cluster=cluster,
            sparse=sparse,
            beside=NOTHING if codec is None else codec.encode,
            apart_behind=_behind(
                apart, cluster, lambda n: sparse.apart_s([n], sparse.sent_bytes(n))
            ),
            one_behind=_behind(setting, cluster, sparse.gather_s),
        )

    def seconds(self, groups: Iterable[MixedGroup]) -> float:
        """When the backward pass and all messages of these groups have ended."""
        inline_s = [0.0] * len(self.backward_s)
        messages: list[TimedMessage] = []
        for group in groups:
            timed = self._known.get(group) or self.timed(group)
            for layer, seconds in timed.inline:
                inline_s[layer] += seconds
            messages += timed.messages
        return end_of(ready_times(self.backward_s, inline_s), messages)

    def timed(self, group: MixedGroup) -> TimedGroup:
        """The seconds of one group, by itself.

        Infinite where more elements than ``MOST_ELEMENTS`` would be sparsified
        together.
        """
        made = self._as_one(group) if group.ways[0] in WHOLE else self._apart(group)
        self._known[group] = made
        return made

    def _as_one(self, group: MixedGroup) -> TimedGroup:
        numel = sum(cost.numel for cost in self.costs[group.start : group.stop])
        last = self.layers[group.stop - 1]
        carry = self.sparse.gather_s(numel) + self.one_behind.seconds(numel)
        carry = carry if numel <= MOST_ELEMENTS else inf
        if not self.is_flat:
            return TimedGroup((), (TimedMessage(last, (), carry),))
        if group.ways[0] == Way.ONE_INLINE:
            inline = ((last, self.sparse.encode_s(numel)),)
            return TimedGroup(inline, (TimedMessage(last, (), carry),))
        works = ((last, self.beside.seconds(numel)),)
        return TimedGroup((), (TimedMessage(last, works, carry),))

    def _apart(self, group: MixedGroup) -> TimedGroup:
        inline: list[tuple[int, float]] = []
        works: list[tuple[int, float]] = []
        dense_bytes = gathered_bytes = 0
        dense_last = sparse_last = 0
        numels: list[int] = []
        own_slice = slice(group.start, group.stop)
        for way, cost, layer in zip(
            group.ways, self.costs[own_slice], self.layers[own_slice], strict=True
        ):
            if way == Way.DENSE:
                dense_bytes = dense_bytes + cost.size_bytes
                dense_last = layer
                continue
            numels.append(cost.numel)
            sparse_last = layer
            gathered_bytes += cost.sent_bytes
            if way == Way.INLINE:
                inline.append((layer, cost.inline_s))
            elif self.is_flat:
                works.append((layer, cost.beside_s))
        messages = []
        if dense_bytes:
            carry = self.cluster.all_reduce_s(dense_bytes)
            messages.append(TimedMessage(dense_last, (), carry))
        if numels:
            carry = self.sparse.apart_s(numels, gathered_bytes)
            carry += self.apart_behind.seconds(self.sparse.longest(numels))
            carry = carry if sum(numels) <= MOST_ELEMENTS else inf
            messages.append(
                TimedMessage(max(dense_last, sparse_last), tuple(works), carry)
            )
        return TimedGroup(tuple(inline), tuple(messages))


def _behind(
    exchange: ExchangeSetting, cluster: Cluster, gather_s: Callable[[int], float]
) -> LineFit:
    """The line, over elements, of what an exchange computes behind its all-gather."""
    if cluster.num_ranks == 1:
        return NOTHING
    few = 10_000
    many = 10_000_000
    low_s, high_s = (
        max(
            0.0,
            carry_s([ProfiledTensor(name="t", shape=(numel,))], exchange, cluster)
            - gather_s(numel),
        )
        for numel in (few, many)
    )
    slope = max(0.0, high_s - low_s) / (many - few)
    return LineFit(alpha_s=max(0.0, low_s - slope * few), per_unit_s=slope)


MOST_TRIED = 2500
"""The most changes of groups that are tried; each takes about a tenth of a
millisecond.
"""


def improved(
    groups: Sequence[MixedGroup],
    cost: MixedCost,
    *,
    as_one: bool = True,
    most: int = MOST_TRIED,
) -> tuple[list[MixedGroup], float]:
    """Groups that end no later, and when they end: every change that gains is kept.

    Changes are of one tensor's way, of a whole group's, and of borders. It ends when
    none gains, or when ``most`` were tried. Without ``as_one`` no two tensors come to
    be sparsified as one.
    """
    best = list(groups)
    best_s = cost.seconds(groups)
    tried = 0
    gained = True
    while gained and tried < most:
        gained = False
        place = 0
        while place < len(best) and tried < most:
            for start, stop, instead in _changes(best, place, cost, as_one):
                tried += 1
                other = [*best[:start], *instead, *best[stop:]]
                other_s = cost.seconds(other)
                if other_s < best_s * (1 - 1e-9):
                    best = other
                    best_s = other_s
                    gained = True
                    break
                if tried >= most:
                    break
            else:
                place += 1
            place = min(place, len(best))
    return best, best_s


Change = tuple[int, int, tuple[MixedGroup, ...]]
"""Groups ``start:stop`` of a list, and those in their place."""


def _changes(
    groups: list[MixedGroup], place: int, cost: MixedCost, as_one: bool
) -> Iterator[Change]:
    """The changes of one group, and of its border with the next."""
    group = groups[place]
    start, stop, ways = group
    numels = [cost.numel for cost in cost.costs[start:stop]]
    for way in whole_ways(stop - start, as_one):
        if way != ways[0]:
            yield place, place + 1, (MixedGroup(start, stop, (way,) * len(ways)),)
    if ways[0] not in WHOLE:
        falling = sorted(range(len(ways)), key=lambda place: -numels[place])
        for one in falling[:MOST_FLIPPED]:
            for way in (Way.EARLY, Way.INLINE, Way.DENSE):
                if way != ways[one]:
                    changed = (*ways[:one], way, *ways[one + 1 :])
                    yield place, place + 1, (MixedGroup(start, stop, changed),)
    for cut in sorted({1, (stop - start) // 2, stop - start - 1} - {0, stop - start}):
        parts = (
            MixedGroup(start, start + cut, ways[:cut]),
            MixedGroup(start + cut, stop, ways[cut:]),
        )
        yield place, place + 1, parts
    if place + 1 < len(groups):
        yield from _of_border(groups, place, cost, as_one)


MOST_FLIPPED = 24
"""The most tensors of a group, the largest, whose own ways are changed."""


def _of_border(
    groups: list[MixedGroup], place: int, cost: MixedCost, as_one: bool
) -> Iterator[Change]:
    (start, middle, before), (_, stop, after) = groups[place : place + 2]
    if cost.tensors[middle - 1].dtype != cost.tensors[middle].dtype:
        return
    is_whole = before[0] in WHOLE or after[0] in WHOLE
    if is_whole and (before[0] != after[0] or not as_one):
        return
    both = (*before, *after)
    yield place, place + 2, (MixedGroup(start, stop, both),)
    for cut in (middle - 4, middle - 1, middle + 1, middle + 4):
        if start < cut < stop:
            parts = (
                MixedGroup(start, cut, both[: cut - start]),
                MixedGroup(cut, stop, both[cut - start :]),
            )
            yield place, place + 2, parts


def borders_of_dtypes(tensors: Sequence[ProfiledTensor]) -> list[int]:
    """The places between two tensors of different dtypes, which no group may hold."""
    return [
        place
        for place, (one, other) in enumerate(pairwise(tensors), 1)
        if one.dtype != other.dtype
    ]
