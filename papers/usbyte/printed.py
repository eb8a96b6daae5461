"""Algorithm 1 of US-Byte exactly as printed, to see the figures that its fault would
give.

Source: Gao et al., US-Byte, algorithm 1, lines 7 to 27. Where two operations in a row
serve one layer (lines 13 and 14), the count of the first is overwritten (line 21) after
it was taken off the remaining blocks (line 22). Those blocks are in no operation, and
iterations look shorter than they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.planning.buckets import buckets
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.profile import Profile
from gradwire_lab.planning.phases import Instance, UnequalBlock, greedy


@dataclass(frozen=True)
class AsPrinted(Instance):
    """An instance whose blocks are the printed algorithm's: some are lost."""

    def blocks(self, place: Sequence[int]) -> list[UnequalBlock]:
        """Operations in issue order; only their counts are known, so ``first_basic`` is
        0.
        """
        left = [0] * len(self.layer)
        found = self._lossy_phase(place, left)
        free_s = max(self.layer_ends_s[0], found[-1].end_s if found else 0.0)
        for bucket, count in enumerate(left):
            if count:
                left[bucket] = 0
                found.append(self._operation(bucket, count, free_s, left))
                free_s = found[-1].end_s
        return found

    def _lossy_phase(self, place: Sequence[int], left: list[int]) -> list[UnequalBlock]:
        found: list[UnequalBlock] = []
        ends_s = [self.layer_ends_s[layer] for layer in self.layer]
        now_s = ends_s[-1]
        for layer in range(len(left) - 1, -1, -1):
            while now_s < ends_s[layer]:
                ready = [bucket for bucket, count in enumerate(left) if count]
                if not ready:
                    now_s = ends_s[layer]
                    break
                bucket = min(ready, key=place.__getitem__)
                if found and found[-1].bucket == bucket:
                    now_s = found.pop().start_s  # and with it the blocks it counted
                count = self._count(bucket, left[bucket], ends_s[layer] - now_s)
                left[bucket] -= count
                found.append(self._operation(bucket, count, now_s, left))
                now_s = found[-1].end_s
            left[layer] = self.num_basic[layer]
        return found

    def _count(self, bucket: int, left: int, gap_s: float) -> int:
        """The number of basic blocks to send, by equations 4 to 7."""
        basic_s = self.beta_s_per_byte * self.basic_bytes[bucket]
        if gap_s < self.alpha_s:
            return 1
        if gap_s < self.alpha_s + basic_s * left:
            return max(1, math.ceil((gap_s - self.alpha_s) / basic_s))
        return left

    def _operation(
        self, bucket: int, count: int, start_s: float, left: Sequence[int]
    ) -> UnequalBlock:
        """An operation with its seconds, by equations 1 and 8."""
        size_bytes = count * self.basic_bytes[bucket]
        if left[bucket] == 0:
            size_bytes -= (
                self.num_basic[bucket] * self.basic_bytes[bucket]
                - self.size_bytes[bucket]
            )
        seconds = self.alpha_s + self.beta_s_per_byte * size_bytes
        return UnequalBlock(bucket, 0, count, start_s, start_s + seconds)


@dataclass(frozen=True)
class Lossy:
    """The result of the printed algorithms."""

    iteration_s: float
    fraction_sent: float
    """The plan's basic blocks over all of the model's; 1 in a plan that trains the
    model.
    """


def plan_as_printed(profile: Profile, cluster: Cluster, basic_bytes: int) -> Lossy:
    """Algorithm 2 over algorithm 1, both as printed."""
    instance = AsPrinted.of(profile, cluster, buckets(profile), basic_bytes)
    found = greedy(instance)
    sent = sum(block.num_basic for block in found.blocks)
    return Lossy(found.iteration_s, sent / sum(instance.num_basic))
