"""The two phases of US-Byte: from priorities to unequal blocks and their starts.

Source: US-Byte, algorithm 1 (first phase) and equations 9 to 12 with theorem 1 (second
phase).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradwire.planning.buckets import Bucket
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import PlannedMessage
from gradwire.planning.data.profile import Profile
from gradwire.planning.simulation.closed_form import (
    Lane,
    backward_ends,
    forward_times,
)

from .blocks import block_starts, item_bytes, message_of

# ---- the two phases ------------------------------------------------------------------


class UnequalBlock(NamedTuple):
    """One all-reduce: a bucket's ``num_basic`` basic blocks from ``first_basic`` on."""

    bucket: int
    first_basic: int
    num_basic: int
    start_s: float
    end_s: float


def messages_of_blocks(
    cut: Sequence[Bucket], instance: Instance, blocks: Sequence[UnequalBlock]
) -> tuple[PlannedMessage, ...]:
    """The messages of an instance's blocks, whose buckets are ``cut``."""
    messages = []
    for index, first, count, _, _ in blocks:
        bucket = cut[index]
        step = block_starts(bucket, instance.basic_bytes[index]).step
        messages.append(message_of(bucket, first * step, (first + count) * step))
    return tuple(messages)


@dataclass(frozen=True)
class Instance:
    """Algorithm 1's input: buckets in forward order, cut into basic blocks, and times.

    ``layer_ends_s`` and ``forward_s`` have an element for each layer; ``layer``,
    ``size_bytes``, ``basic_bytes`` and ``num_basic`` one for each bucket.
    """

    alpha_s: float
    beta_s_per_byte: float
    layer_ends_s: list[float]
    """The second at which each layer's backward ends; layers are in forward order."""
    forward_s: list[float]
    layer: list[int]
    """The place in forward order of each bucket's layer."""
    size_bytes: list[int]
    basic_bytes: list[int]
    num_basic: list[int]

    @classmethod
    def of(
        cls, profile: Profile, cluster: Cluster, cut: Sequence[Bucket], basic_bytes: int
    ) -> Instance:
        """Buckets cut into basic blocks of up to ``basic_bytes`` in whole elements."""
        starts = [block_starts(bucket, basic_bytes) for bucket in cut]
        return cls(
            alpha_s=cluster.alpha_s,
            beta_s_per_byte=cluster.beta_s_per_byte,
            layer_ends_s=backward_ends(profile, cluster),
            forward_s=[layer.forward_s for layer in profile.layers],
            layer=[b.layer for b in cut],
            size_bytes=[b.size_bytes for b in cut],
            basic_bytes=[
                own.step * item_bytes(b) for own, b in zip(starts, cut, strict=True)
            ],
            num_basic=[*map(len, starts)],
        )

    def blocks(self, place: Sequence[int]) -> list[UnequalBlock]:
        """All blocks in issue order.

        The bucket of the smallest ``place`` is the most urgent.

        Between the ends of two layers the most urgent bucket that is ready sends as
        many basic blocks as fit, and at least one. If that bucket is still the most
        urgent one after the second end, its block grows.
        """
        sent = [0] * len(self.layer)
        blocks = self._first_phase(place, sent)
        free_s = max(self.layer_ends_s[0], blocks[-1].end_s if blocks else 0.0)
        for bucket, num_basic in enumerate(self.num_basic):
            if sent[bucket] == num_basic:
                continue
            first = sent[bucket]
            start_s = free_s
            if blocks and blocks[-1].bucket == bucket:
                _, first, _, start_s, _ = blocks.pop()
            blocks.append(self._block(bucket, first, num_basic - first, start_s))
            free_s = blocks[-1].end_s
        return blocks

    def iteration_s(self, blocks: Sequence[UnequalBlock]) -> float:
        """The second at which the last layer's forward ends (equations 11 and 12)."""
        done_s = [self.layer_ends_s[0]] * len(self.forward_s)
        layer = self.layer
        for block in blocks:
            done_s[layer[block.bucket]] = max(block.end_s, done_s[layer[block.bucket]])
        return forward_times(self.forward_s, done_s)[1][-1]

    def uncut(self) -> list[UnequalBlock]:
        """Every bucket whole: in backward order until the backward pass ends, then in
        forward order (theorem 1).
        """
        blocks = []
        link = Lane()
        coming = list(range(len(self.layer)))
        while coming:
            place = -1
            ready_s = self.layer_ends_s[self.layer[coming[place]]]
            if link.start_s(ready_s) >= self.layer_ends_s[0]:
                place = 0
                ready_s = self.layer_ends_s[0]
            bucket = coming.pop(place)
            start_s = link.start_s(ready_s)
            block = self._block(bucket, 0, self.num_basic[bucket], start_s)
            blocks.append(block)
            link.free_s = block.end_s
        return blocks

    def _first_phase(self, place: Sequence[int], sent: list[int]) -> list[UnequalBlock]:
        """Algorithm 1 with its accumulation mended.

        Counts in ``sent`` what it sends.
        """
        blocks = []
        waiting: list[tuple[int, int]] = []  # a heap of (place, bucket)
        coming = len(self.layer) - 1
        began_s = 0.0
        # the block that may still grow
        last = -1
        first = 0
        start_s = 0.0
        done_s = 0.0
        for layer in range(len(self.layer_ends_s) - 1, -1, -1):
            end_s = self.layer_ends_s[layer]
            while waiting and max(done_s, began_s) < end_s:
                bucket = waiting[0][1]
                if bucket != last:
                    if last >= 0:
                        blocks.append(
                            UnequalBlock(
                                last, first, sent[last] - first, start_s, done_s
                            )
                        )
                    last = bucket
                    first = sent[bucket]
                    start_s = max(done_s, began_s)
                # This counts the whole block, of which a part may be counted already.
                # The paper takes it off what that part has left of the bucket, and so
                # loses blocks.
                sent[bucket] = self._reach(bucket, first, sent[bucket], end_s - start_s)
                if sent[bucket] == self.num_basic[bucket]:
                    heapq.heappop(waiting)
                done_s = start_s + self._seconds(bucket, first, sent[bucket])
            while coming >= 0 and self.layer[coming] == layer:
                heapq.heappush(waiting, (place[coming], coming))
                coming -= 1
            began_s = end_s
        if last >= 0:
            blocks.append(
                UnequalBlock(last, first, sent[last] - first, start_s, done_s)
            )
        return blocks

    def _reach(self, bucket: int, first: int, reached: int, gap_s: float) -> int:
        """Where a block from basic block ``first`` on stops that starts ``gap_s``
        before the layer's end (equations 4 to 7): at least one basic block beyond where
        it had ``reached``.
        """
        basic_bytes = self.basic_bytes[bucket]
        room_s = gap_s - self.alpha_s
        if room_s >= self.beta_s_per_byte * (
            self.size_bytes[bucket] - first * basic_bytes
        ):
            return self.num_basic[bucket]
        fit = first
        if room_s > 0:  # then a byte costs something, or all of them would have fitted
            fit += math.ceil(room_s / (self.beta_s_per_byte * basic_bytes))
        return min(max(fit, reached + 1), self.num_basic[bucket])

    def _seconds(self, bucket: int, first: int, stop: int) -> float:
        """Seconds that basic blocks ``first:stop`` take as one message."""
        basic_bytes = self.basic_bytes[bucket]
        size_bytes = self.size_bytes[bucket]
        if stop == self.num_basic[bucket]:
            stop_bytes = size_bytes
        else:
            stop_bytes = stop * basic_bytes
        return self.alpha_s + self.beta_s_per_byte * (stop_bytes - first * basic_bytes)

    def _block(
        self, bucket: int, first: int, num_basic: int, start_s: float
    ) -> UnequalBlock:
        end_s = start_s + self._seconds(bucket, first, first + num_basic)
        return UnequalBlock(bucket, first, num_basic, start_s, end_s)


# ---- Orders of priority for the first phase ------------------------------------------
#
# Source: US-Byte, algorithm 2 and equation 13.


@dataclass(frozen=True)
class PricedOrder:
    """Priorities, a place for each bucket (smallest first), and their blocks."""

    place: list[int]
    blocks: list[UnequalBlock]
    iteration_s: float

    @classmethod
    def of(cls, instance: Instance, place: list[int]) -> PricedOrder:
        blocks = instance.blocks(place)
        return cls(place, blocks, instance.iteration_s(blocks))


def greedy(instance: Instance) -> PricedOrder:
    """Algorithm 2: from last to first layer, a higher priority is kept if it helps."""
    best = PricedOrder.of(instance, list(range(len(instance.layer))))
    raised = len(best.place) - 1
    while raised > 0:
        above = _raise_to(instance, best.blocks, raised)
        if above < raised:
            trial = best.place[:]
            trial[raised] = trial[above]
            trial[above:raised] = [place + 1 for place in trial[above:raised]]
            other = PricedOrder.of(instance, trial)
            if other.iteration_s < best.iteration_s:
                best = other
                raised = above
        raised -= 1
    return best


def _raise_to(instance: Instance, blocks: list[UnequalBlock], raised: int) -> int:
    """The first bucket ready while ``raised`` would be sent whole (equation 13)."""
    backward_s = instance.layer_ends_s[0]
    start_s = next(block.start_s for block in blocks if block.bucket == raised)
    if start_s >= backward_s:
        return raised
    end_s = (
        start_s
        + instance.alpha_s
        + instance.beta_s_per_byte * instance.size_bytes[raised]
    )
    above = raised
    while above > 0 and instance.layer_ends_s[instance.layer[above - 1]] < end_s:
        above -= 1
    return above
