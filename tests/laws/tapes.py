"""A replay of partial rounds: from the lines of all ranks' tapes, in one process.

It needs no clock: a tape says at which local steps each rank pushed, and took which
merge in.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from gradwire.errors import Deadlock
from gradwire.exchange.rounds import Merge, Push
from gradwire.kernels.crc import crc32
from gradwire_lab.errors import LawBroken
from gradwire_lab.exchange.virtual_rounds import VirtualRank


def replay(
    tape: Iterable[str], ranks: Sequence[VirtualRank], num_steps: Sequence[int]
) -> None:
    """Repeats a run from the lines of all ranks' tapes, bit for bit.

    Args:
        tape: The lines. Lines of one rank are in their order.
        ranks: Ranks as they were at the start.
        num_steps: The local steps of each rank.

    Raises:
        Deadlock: Lines of a round are missing.
        RanksDiffer: A rank's line is missing.
        LawBroken: A line's anchor has other bits.
    """
    script = _Script(ranks, [json.loads(line) for line in tape])
    while any(r.rounds.step < num for r, num in zip(ranks, num_steps, strict=True)):
        moves = [script.advance(rank, num) for rank, num in enumerate(num_steps)]
        if not any(moves):
            stuck = [f"rank {r.rounds.rank} after step {r.rounds.step}" for r in ranks]
            raise Deadlock(f"lines of the tape are missing: {', '.join(stuck)}")


class _Script:
    """The events of a tape, and the pushes and merges that a replay has made."""

    def __init__(self, ranks: Sequence[VirtualRank], lines: list[Any]) -> None:
        self.ranks = ranks
        self.taken: dict[Any, list[Any]] = defaultdict(list)
        self.asked: dict[Any, set[int]] = defaultdict(set)
        self.lists: dict[Any, list[Any]] = {}
        self.pushes: dict[Any, Push] = {}
        self.merges: dict[Any, Merge] = {}
        self.anchors: dict[Any, int] = {}
        for line in lines:
            fragment = line["fragment"]
            closed = (fragment, line["round"])
            self.taken[line["rank"], line["step"]].append(closed)
            self.anchors[line["rank"], *closed] = line["anchor"]
            self.lists[closed] = [
                (fragment, entry["rank"], entry["number"]) for entry in line["who"]
            ]
            for entry in line["who"]:
                self.asked[entry["rank"], entry["step"]].add(fragment)

    def advance(self, rank: int, num_steps: int) -> bool:
        """Makes a rank's local steps until it needs a merge that is not made yet."""
        virtual = self.ranks[rank]
        begun = virtual.rounds.step
        while virtual.rounds.step < num_steps:
            here = (rank, virtual.rounds.step + 1)
            if not all(self._is_made(closed) for closed in self.taken[here]):
                break
            virtual.rounds.inbox.extend(
                self.merges[closed] for closed in self.taken[here]
            )
            for fragment in self.asked[here]:
                virtual.rounds.learners[fragment].is_asked = True
            for request in virtual.local_step():
                if isinstance(request, Push):
                    self.pushes[request.fragment, rank, request.number] = request
            self._compare(virtual, self.taken[here])
        return virtual.rounds.step > begun

    def _compare(self, virtual: VirtualRank, taken: list[tuple[int, int]]) -> None:
        """Refuses anchors that are not those of the tape."""
        rank = virtual.rounds.rank
        for fragment, version in dict(taken).items():
            anchor_N = virtual.rounds.learners[fragment].anchor_N
            if crc32(anchor_N) != self.anchors[rank, fragment, version]:
                raise LawBroken(
                    f"rank {rank}'s anchor of fragment {fragment} after round "
                    f"{version} is not the tape's: the run was another one"
                )

    def _is_made(self, closed: tuple[int, int]) -> bool:
        fragment, version = closed
        owner = self.ranks[fragment % len(self.ranks)].rounds.owners[fragment]
        while owner.version < version:
            wanted = self.lists.get((fragment, owner.version + 1))
            if wanted is None or not all(key in self.pushes for key in wanted):
                return False
            owner.pushes = {key[1]: self.pushes[key] for key in wanted}
            merge = owner.close()
            self.merges[fragment, merge.version] = merge
        return True
