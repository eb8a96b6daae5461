"""The laws of partial rounds whose ranks are lost, parted or come, and runs of them.

What happens, and when, is drawn from a seed. At the end of a run all ranks that live
are in one epoch, and a last round takes all in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gradwire.compress.topk import topk
from gradwire.exchange.rounds import (
    Answer,
    FragmentLearner,
    Merge,
    Push,
    Request,
    Restart,
    Snapshot,
)
from gradwire_lab.exchange.virtual_rounds import VirtualClock
from gradwire_lab.laws.tolerance import must, same_bits
from tests.laws import rounds_laws
from tests.laws.rounds_laws import NUMELS, Conditions, Run, near

LOSSY = topk(density=0.3)
HAPPENINGS = ("lose", "lose its owner", "lose two", "part", "come")


class WatchedLearner(FragmentLearner):
    """Keeps the merges that its anchor holds, also those of a snapshot."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.history: list[Merge] = []

    def take(self, merge: Merge, param_N: Tensor) -> bool:
        is_new = super().take(merge, param_N)
        if is_new:
            self.history.append(merge)
        return is_new

    def snapshot(self, rank: int, restart: Restart) -> Snapshot:
        made = super().snapshot(rank, restart)
        _HISTORIES[id(made.payload_B)] = (made.payload_B, [*self.history])
        return made

    def catch_up(self, snapshot: Snapshot, param_N: Tensor) -> bool:
        is_new = super().catch_up(snapshot, param_N)
        if is_new:
            self.history = [*_HISTORIES[id(snapshot.payload_B)][1]]
        return is_new


_HISTORIES: dict[int, tuple[Tensor, list[Merge]]] = {}


@dataclass(frozen=True, kw_only=True)
class Churn(Conditions):
    """Conditions of a run in which so many things happen to its ranks."""

    num_happenings: int = 3
    kinds: tuple[str, ...] = HAPPENINGS
    learner: type[FragmentLearner] = WatchedLearner
    clock: type[VirtualClock] = VirtualClock


class ChurnRun(Run):
    """One run; ``live`` are the ranks that are there at its end."""

    def play(self) -> Run:
        conditions = self.conditions
        assert isinstance(conditions, Churn)
        draw = conditions.draw
        self.clock = conditions.clock(
            self.ranks,
            step_s=lambda rank: (0.2 + 0.07 * (rank % 4)) * draw.uniform(0.5, 1.5),
            delay_s=lambda source, target, size: (
                0.0 if source == target else draw.uniform(0.0, 0.6)
            ),
            repeats=lambda number: number % 5 == 0,
            is_held=True,
        )
        self.draw = draw
        self.missed: list[tuple[int, int, int, int]] = []
        """Of ranks that come back: the rank, the fragment, its round, and the last."""
        self.closed_apart = 0
        """Rounds that closed where they must not."""
        for _ in range(conditions.num_happenings):
            self._run_on(draw.uniform(1.0, 4.0))
            happen = draw.choice(conditions.kinds)
            getattr(self, happen.replace(" ", "_"))()
        self.live = sorted(self.clock.live)
        self.before = self._arrived(self.live)
        self._run_on(9.0)
        self.after = self._arrived(self.live)
        self.messages = self.clock.sent
        self.end()
        return self

    def _run_on(self, seconds: float) -> None:
        self.clock.run(self.clock.now_s + seconds)

    def _arrived(self, ranks: Iterable[int]) -> list[int]:
        """The last round of each fragment among ranks."""
        rows = [self.ranks[rank].rounds._arrived for rank in ranks]
        return [max(versions) for versions in zip(*rows, strict=True)]

    def _lose(self, lost: set[int]) -> None:
        """Ends ranks, which the others notice after some time."""
        for rank in lost:
            self.clock.lose(rank, self.draw.uniform(0.0, 0.5))
        self._run_on(self.draw.uniform(0.1, 0.7))
        self.clock.begin_epoch(self.clock.live)

    def lose(self, count: int = 1) -> None:
        live = sorted(self.clock.live)
        self._lose({*self.draw.sample(live, min(count, len(live) - 1))})

    def lose_two(self) -> None:
        self.lose(2)

    def lose_its_owner(self) -> None:
        """Loses an owner just after it has sent a merge."""
        sent = self.clock.sent
        for _ in range(200):
            before = len(sent)
            self._run_on(0.02)
            merges = [m for m in sent[before:] if isinstance(m, Merge)]
            if merges and len(self.clock.live) > 1:
                rounds = self.ranks[min(self.clock.live)].rounds
                self._lose({rounds.owner_of[merges[-1].fragment]})
                return

    def part(self) -> None:
        """Cuts some ranks off from the others, which train on, and brings them back."""
        live = sorted(self.clock.live)
        if len(live) < 2:
            return
        away = {*self.draw.sample(live, self.draw.randint(1, len(live) - 1))}
        groups = (away, self.clock.live - away)
        for group in groups:
            self.clock.begin_epoch(group)
        begun = [self._arrived(group) for group in groups]
        self._run_on(self.draw.uniform(0.5, 5.0))
        num_quorate = 0
        for group, versions in zip(groups, begun, strict=True):
            is_quorate = self.ranks[min(group)].rounds.epoch.is_quorate
            num_quorate += is_quorate
            self.closed_apart += not is_quorate and versions != self._arrived(group)
            if is_quorate:
                continue
            last = self._arrived(self.clock.live - group)
            for rank in group:
                own = self.ranks[rank].rounds._arrived
                self.missed += [
                    (rank, learner.fragment, own[learner.fragment], version)
                    for learner, version in zip(
                        self.ranks[rank].rounds.learners, last, strict=True
                    )
                    if learner._steps
                ]
        self.closed_apart += num_quorate > 1
        if not num_quorate:
            self.missed = []
        self.clock.begin_epoch(self.clock.live)

    def come(self) -> None:
        """Has a new rank come, whose parameters are others."""
        virtual = self._rank(len(self.ranks))
        for param, learner in zip(virtual.params, virtual.rounds.learners, strict=True):
            param.fill_(3.0)
            learner.anchor_N.fill_(3.0)
        self.learnt.append([torch.zeros(n, dtype=torch.float64) for n in NUMELS])
        self.ranks.append(virtual)
        self.clock.add(virtual)
        self.clock.begin_epoch(self.clock.live)

    def end(self) -> None:
        """Begins a last epoch of all, and a round that takes all in."""
        self.clock.begin_epoch(self.live)
        queue: list[tuple[int, Request | Answer]] = []

        def send(rank: int, requests: list[Request]) -> None:
            owner_of = self.ranks[rank].rounds.owner_of
            self.messages.extend(requests)
            for message in requests:
                is_snapshot = isinstance(message, Snapshot)
                to = message.rank if is_snapshot else owner_of[message.fragment]
                queue.append((to, message))
                owners = self.ranks[rank].rounds.owners
                if is_snapshot and message.fragment in owners:
                    owners[message.fragment].is_sending = False

        def deliver() -> None:
            while queue:
                to, message = queue.pop(0)
                rounds = self.ranks[to].rounds
                for answer in rounds.receive(message, 0.0):
                    queue.extend((rank, answer) for rank in self.live)
                send(to, rounds.settle(self.ranks[to].params))

        for step in ("settle", "begin_last"):
            for rank in self.live:
                own = self.ranks[rank]
                send(rank, getattr(own.rounds, step)(own.params))
            deliver()


@lru_cache(maxsize=2)
def churned(conditions: Churn) -> ChurnRun:
    run = ChurnRun(conditions)
    run.play()
    return run


def histories(run: ChurnRun, fragment: int) -> list[list[Merge]]:
    learners = [run.ranks[rank].rounds.learners[fragment] for rank in run.live]
    return [learner.history for learner in learners]  # type: ignore[attr-defined]


# ---- laws ----------------------------------------------------------------------------


def law_survivors_have_the_same_bits(conditions: Churn) -> None:
    """All ranks that live end with the same anchors, and with these as parameters."""
    run = churned(replace(conditions, outer=rounds_laws.DILOCO))
    for fragment in range(len(NUMELS)):
        owns = [run.ranks[rank] for rank in run.live]
        anchors = [own.rounds.learners[fragment].anchor_N for own in owns]
        must(all(same_bits(anchors[0], a) for a in anchors), "anchors differ")
        for own in owns:
            anchor_N = anchors[0].to(own.params[fragment].dtype)
            must(same_bits(anchor_N, own.params[fragment]), "parameters differ")
            must(not own.rounds.last_owners, "a last round has not ended")


def law_survivors_have_the_same_merges(conditions: Churn) -> None:
    """A merge is taken by all that live or by none, and each round closes once."""
    run = churned(conditions)
    for fragment in range(len(NUMELS)):
        first, *others = histories(run, fragment)
        versions = [merge.version for merge in first]
        must(versions == [*range(1, len(first) + 1)], f"rounds are {versions[-9:]}")
        for other in others:
            must([*map(id, other)] == [*map(id, first)], "ranks took other merges")


def law_no_push_counts_twice_in_a_history(conditions: Churn) -> None:
    """A push is in one merge at most of those that survive."""
    run = churned(conditions)
    for fragment in range(len(NUMELS)):
        counts = Counter(
            (entry.rank, entry.number)
            for merge in histories(run, fragment)[0]
            for entry in merge.contributions
            if entry.weight
        )
        must(max(counts.values(), default=1) == 1, f"{counts.most_common(2)}")


def law_what_survivors_learnt_is_kept(conditions: Churn) -> None:
    """What a rank that lives has learnt is in merges that survive, or its residual."""
    run = churned(conditions)
    sent = {
        (push.fragment, push.rank, push.number): push
        for push in run.messages
        if isinstance(push, Push)
    }
    for fragment in range(len(NUMELS)):
        for rank in run.live:
            learner = run.ranks[rank].rounds.learners[fragment]
            assert learner.codec.residual_N is not None
            kept_N = learner.codec.residual_N.double()
            size_N = run.magnitude[fragment].clone()
            for merge in histories(run, fragment)[0]:
                for entry in merge.contributions:
                    key = (fragment, rank, entry.number)
                    if entry.rank == rank and entry.weight and key in sent:
                        push_N = learner.codec.decode(sent[key].payload_B).double()
                        kept_N += push_N
                        size_N += push_N.abs()
            near(kept_N, run.learnt[rank][fragment], size_N, f"rank {rank} has lost")


def law_anchors_are_what_merges_say(conditions: Churn) -> None:
    """The way of an anchor is the sum of the merges that survive."""
    run = churned(conditions)
    for fragment in range(len(NUMELS)):
        learner = run.ranks[run.live[0]].rounds.learners[fragment]
        way_N = run.firsts[fragment].double() - learner.anchor_N.double()
        size_N = run.magnitude[fragment].clone()
        sum_N = torch.zeros_like(way_N)
        for merge in histories(run, fragment)[0]:
            mean_N = learner.codec.decode(merge.payload_B).double()
            sum_N += mean_N
            size_N += mean_N.abs() + run.firsts[fragment].double().abs()
        near(sum_N, way_N, size_N, "anchors have something else")


def law_rounds_go_on(conditions: Churn) -> None:
    """Rounds close after all that has happened, and take all in that live."""
    run = churned(conditions)
    if not run.ranks[run.live[0]].rounds.epoch.is_quorate:
        return
    for fragment, (before, after) in enumerate(zip(run.before, run.after, strict=True)):
        must(after > before, f"no round of fragment {fragment} has closed")
        closed = [
            merge
            for merge in histories(run, fragment)[0]
            if before < merge.version <= after
        ]
        there = {entry.rank for merge in closed for entry in merge.contributions}
        must({*run.live} <= there, f"only ranks {there} of {run.live} take part")


def law_a_minority_merges_nothing(conditions: Churn) -> None:
    """At most one of two groups closes rounds; work of the other counts by its age."""
    run = churned(replace(conditions, kinds=("part", "part", "lose")))
    must(not run.closed_apart, "rounds closed among fewer than half of the ranks")
    for rank, fragment, version, last in run.missed:
        entries = [
            entry
            for merge in histories(run, fragment)[0]
            if merge.version > last and rank in run.live
            for entry in merge.contributions
            if entry.rank == rank
        ]
        if entries and entries[0].steps:
            age = entries[0].age
            must(
                age >= last - version, f"work of {last - version} rounds has age {age}"
            )


LAWS: tuple[Callable[[Churn], None], ...] = tuple(
    found for name, found in sorted(globals().items()) if name.startswith("law_")
)
