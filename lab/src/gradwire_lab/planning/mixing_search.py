"""The first groups of a mixed fusion: a dynamic programme over borders that keeps
several states.

Backward pass, compute lane and link are busy until three seconds, and which of them
will be the last to end is not known half way. So each border keeps up to ``MOST_KEPT``
states, of which none is better than another in all three. Groups begin and end at some
borders only, and tensors go in a few ways by their sizes. What is left to gain is found
by ``mixing.improved``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gradwire.planning.data.fit import Floats

from .mixing import MixedCost, MixedGroup, Way, borders_of_dtypes, whole_ways

MOST_CELLS = 32
"""About how many stretches the model is cut into, at whose borders groups may begin and
end.
"""
MOST_KEPT = 40
"""The most states of a border."""


def cells_of(cost: MixedCost) -> list[int]:
    """Borders of stretches of about equal shares of bytes or of backward, from 0 to the
    end.

    They lie where layers and dtypes change.
    """
    total_bytes = sum(tensor.size_bytes for tensor in cost.tensors)
    total_s = sum(cost.backward_s) or 1.0
    forced = set(borders_of_dtypes(cost.tensors))
    cells = [0]
    filled = 0.0
    for place in range(1, len(cost.tensors)):
        before = cost.layers[place - 1]
        layer = cost.layers[place]
        filled += cost.tensors[place - 1].size_bytes / total_bytes
        filled += sum(cost.backward_s[before:layer]) / total_s
        if place in forced or (layer != before and filled >= 2 / MOST_CELLS):
            cells.append(place)
            filled = 0.0
    return [*cells, len(cost.tensors)]


LONGEST = 12
"""The most cells of a group, but of one that is sparsified as one."""


class AddedCost(NamedTuple):
    """The seconds that each of F groups adds to backward pass, lane and link."""

    backward_F: Floats
    lane_F: Floats
    """Seconds of the lane's work."""
    behind_F: Floats
    """The end of the lane's work, from the group's begin on, if the lane is free."""
    reduce_F: Floats
    gather_F: Floats
    has_work_F: Floats

    def ends(self, states_S3: Floats) -> Floats:
        """The states that groups lead to, of each state: backward pass, lane and
        link.
        """
        backward_S, lane_S, link_S = states_S3.T[:, None, :]
        columns = [figure[:, None] for figure in self]
        backward, lane, behind, reduce, gather, has_work = columns
        ready_FS = backward_S + backward
        lane_FS = np.where(
            has_work, np.maximum(lane_S + lane, backward_S + behind), lane_S
        )
        link_FS = np.where(
            reduce, np.maximum(link_S, ready_FS) + reduce, link_S + ready_FS * 0
        )
        encoded_FS = np.where(has_work, np.maximum(ready_FS, lane_FS), ready_FS)
        link_FS = np.where(gather, np.maximum(link_FS, encoded_FS) + gather, link_FS)
        return np.stack([ready_FS, lane_FS + ready_FS * 0, link_FS], axis=-1)


def first_groups(
    cost: MixedCost, *, as_one: bool, most: int = 2
) -> Iterator[list[MixedGroup]]:
    """Fusions that end early by the programme's own clock, the earliest first."""
    cells = cells_of(cost)
    forms = _Forms(cost, cells, as_one)
    kept: list[Floats] = [np.zeros((1, 3))]
    came: list[list[tuple[int, int, MixedGroup]]] = [[]]
    for border in range(1, len(cells)):
        found_S3 = []
        origins = []
        for start in range(border):
            groups, added = forms.between(start, border)
            if not groups:
                continue
            ends_FS3 = added.ends(kept[start])
            found_S3.append(ends_FS3.reshape(-1, 3))
            states = len(kept[start])
            origins += [(start, s, group) for group in groups for s in range(states)]
        every_S3 = np.concatenate(found_S3)
        places = _undominated(every_S3)
        kept.append(every_S3[places])
        came.append([origins[place] for place in places])
    last = kept[-1].max(axis=1)
    for state in np.argsort(last, kind="stable")[:most]:
        yield _walk_back(came, int(state))


def _walk_back(
    came: Sequence[Sequence[tuple[int, int, MixedGroup]]], state: int
) -> list[MixedGroup]:
    border = len(came) - 1
    steps = []
    while border:
        border, state, group = came[border][state]
        steps.append(group)
    return steps[::-1]


def _undominated(states_S3: Floats) -> list[int]:
    """Up to ``MOST_KEPT`` states that no other is better than in all three seconds."""
    rows = [tuple(row) for row in np.round(states_S3, 9).tolist()]
    kept: list[int] = []
    lanes: list[
        float
    ] = []  # rising, of the states kept so far that are the first in the link
    links: list[float] = []  # falling
    for place in sorted(range(len(rows)), key=rows.__getitem__):
        _, lane_s, link_s = rows[place]
        at = bisect_right(lanes, lane_s)
        if at and links[at - 1] <= link_s:
            continue
        kept.append(place)
        upto = at
        while upto < len(links) and links[upto] >= link_s:
            upto += 1
        lanes[at:upto] = [lane_s]
        links[at:upto] = [link_s]
    if len(kept) <= MOST_KEPT:
        return kept
    ends = states_S3[kept]
    by_worst = sorted(range(len(kept)), key=lambda place: float(ends[place].max()))
    chosen = dict.fromkeys(by_worst[: MOST_KEPT // 2])
    for step in range(MOST_KEPT - len(chosen)):
        chosen[step * (len(kept) - 1) // (MOST_KEPT // 2 - 1)] = None
    return [kept[place] for place in chosen]


class _Forms:
    """The groups that are tried between two borders, with what they add."""

    def __init__(self, cost: MixedCost, cells: Sequence[int], as_one: bool) -> None:
        self.cost = cost
        self.cells = cells
        self.as_one = as_one
        self.forced = set(borders_of_dtypes(cost.tensors))
        self.thresholds = _thresholds(cost)
        first = [cost.layers[place] for place in cells[:-1]]
        self.layers = [0, *first[1:], len(cost.backward_s)]

    def between(self, start: int, stop: int) -> tuple[list[MixedGroup], AddedCost]:
        """The groups of these cells, and their figures."""
        begin = self.cells[start]
        end = self.cells[stop]
        if any(begin < place < end for place in self.forced):
            return [], AddedCost(*(np.empty(0),) * 6)
        groups = list(dict.fromkeys(self._groups(begin, end, stop - start)))
        rows = [
            self._row(group, self.layers[start], self.layers[stop]) for group in groups
        ]
        return groups, AddedCost(*np.array(rows).reshape(-1, 6).T)

    def _groups(self, begin: int, end: int, num_cells: int) -> Iterator[MixedGroup]:
        numels = [cost.numel for cost in self.cost.costs[begin:end]]
        for way in whole_ways(len(numels), self.as_one):
            yield MixedGroup(begin, end, (way,) * len(numels))
        if num_cells > LONGEST:
            return
        yield MixedGroup(begin, end, (Way.DENSE,) * len(numels))
        for threshold in self.thresholds:
            for way in (Way.EARLY, Way.INLINE):
                ways = tuple(Way.DENSE if n <= threshold else way for n in numels)
                yield MixedGroup(begin, end, ways)
            half = len(numels) // 2
            yield MixedGroup(
                begin,
                end,
                tuple(
                    Way.DENSE
                    if n <= threshold
                    else Way.EARLY
                    if place < half
                    else Way.INLINE
                    for place, n in enumerate(numels)
                ),
            )

    def _row(
        self, group: MixedGroup, first_layer: int, layer: int
    ) -> tuple[float, ...]:
        timed = self.cost.timed(group)
        own_s = self.cost.backward_s[first_layer:layer]
        inline_s = sum(seconds for _, seconds in timed.inline)
        lane_s = behind_s = 0.0
        ready_s = np.cumsum(own_s) if own_s else np.zeros(1)
        carries = [0.0, 0.0]
        for number, message in enumerate(timed.messages):
            is_gather = bool(number) or Way.DENSE not in group.ways
            carries[is_gather] = message.carry_s
            for at, seconds in message.works:
                begin_s = float(ready_s[min(at - first_layer, len(ready_s) - 1)])
                behind_s = max(behind_s, begin_s) + seconds
                lane_s += seconds
        return (
            sum(own_s) + inline_s,
            lane_s,
            behind_s,
            carries[0],
            carries[1],
            float(lane_s > 0),
        )


def _thresholds(cost: MixedCost) -> list[float]:
    """Sizes up to which tensors travel dense: where an encode takes as long as it
    saves.
    """
    numels = sorted({tensor.numel for tensor in cost.tensors})
    added_s = cost.cluster.collective_s("all_reduce", 1e9) / 1e9 * 4
    worth = next(
        (n for n in numels if cost.sparse.encode_s(n) < added_s * n), numels[-1]
    )
    return [worth / 4, worth - 0.5, worth * 3.0]
