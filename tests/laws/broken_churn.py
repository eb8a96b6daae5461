"""Deliberately wrong partial rounds under churn, and the law that must reject each."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gradwire.exchange.rounds import (
    FragmentOwner,
    Restart,
    RoundEpoch,
    Snapshot,
)
from tests.laws import churn_laws as laws
from tests.laws.broken_rounds import MergesAgain
from tests.laws.churn_laws import Churn, WatchedLearner


class MergesInAMinority(FragmentOwner):
    """Rounds close, however few ranks are left."""

    def begin_epoch(self, epoch: RoundEpoch, version: int, *, is_last: bool) -> None:
        super().begin_epoch(epoch._replace(is_quorate=True), version, is_last=is_last)


class KeepsItsAnchor(WatchedLearner):
    """A rank that lacks merges goes on from its own anchor."""

    def catch_up(self, snapshot: Snapshot, param_N: Tensor) -> bool:
        before_N = self.anchor_N.clone()
        is_new = super().catch_up(snapshot, param_N)
        if is_new:
            self.anchor_N.copy_(before_N)
        return is_new


class TakesAPartForAll(WatchedLearner):
    """A rank goes on once the first part of an anchor is there."""

    def catch_up(self, snapshot: Snapshot, param_N: Tensor) -> bool:
        self._parts = dict.fromkeys(range(snapshot.num_parts), snapshot)
        return super().catch_up(snapshot, param_N)


class OverwritesWhatItLearnt(WatchedLearner):
    """A snapshot takes the place of parameters."""

    def catch_up(self, snapshot: Snapshot, param_N: Tensor) -> bool:
        is_new = super().catch_up(snapshot, param_N)
        if is_new:
            param_N.copy_(self.anchor_N)
        return is_new


class SaysALaterRound(WatchedLearner):
    """A snapshot has the next round's number."""

    def snapshot(self, rank: int, restart: Restart) -> Snapshot:
        made = super().snapshot(rank, restart)
        return made._replace(version=made.version + 1)


class WaitsForItsOldPush(WatchedLearner):
    """A rank does not take back the push that went with an owner."""

    def restart(self, restart: Restart) -> None:
        self._epoch = restart.epoch
        self.is_behind = restart.is_behind


class KeepsOldPushes(FragmentOwner):
    """An owner merges pushes of the epoch before, which ranks have taken back."""

    def begin_epoch(self, epoch: RoundEpoch, version: int, *, is_last: bool) -> None:
        pushes = self.pushes
        super().begin_epoch(epoch, version, is_last=is_last)
        self.pushes = pushes


class CountsNoPushOfOthers(WatchedLearner):
    """A snapshot does not say whose pushes a merge has."""

    def snapshot(self, rank: int, restart: Restart) -> Snapshot:
        return super().snapshot(rank, restart)._replace(counted=[])


class ForgetsLosses(WatchedLearner):
    """The loss of a push that is taken back stays in the residual."""

    def restart(self, restart: Restart) -> None:
        assert self.codec.residual_N is not None
        before_N = self.codec.residual_N.clone()
        super().restart(restart)
        self.codec.residual_N.copy_(before_N)


class TrustsItsLastMerges(WatchedLearner):
    """A rank forgets a push once it has the merge, which others may go on without."""

    def catch_up(self, snapshot: Snapshot, param_N: Tensor) -> bool:
        self.merged.clear()
        return super().catch_up(snapshot, param_N)


OWNERS = ("lose its owner",)
LOSSES = ("lose its owner", "lose")
Bite = tuple[Callable[[Churn], None], Churn]
BITES: tuple[Bite, ...] = (
    (
        laws.law_a_minority_merges_nothing,
        Churn(owner=MergesInAMinority, world=5, seed=4),
    ),
    (
        laws.law_anchors_are_what_merges_say,
        Churn(learner=KeepsItsAnchor, kinds=OWNERS, seed=4),
    ),
    (
        laws.law_survivors_have_the_same_bits,
        Churn(learner=KeepsItsAnchor, kinds=OWNERS, world=5),
    ),
    (
        laws.law_survivors_have_the_same_bits,
        Churn(learner=TakesAPartForAll, kinds=("come",), world=5),
    ),
    (
        laws.law_survivors_have_the_same_merges,
        Churn(learner=SaysALaterRound, kinds=OWNERS, world=5),
    ),
    (
        laws.law_no_push_counts_twice_in_a_history,
        Churn(owner=MergesAgain, kinds=LOSSES, world=5, seed=1),
    ),
    (
        laws.law_what_survivors_learnt_is_kept,
        Churn(learner=OverwritesWhatItLearnt, kinds=OWNERS, world=5),
    ),
    (
        laws.law_what_survivors_learnt_is_kept,
        Churn(owner=KeepsOldPushes, kinds=LOSSES, world=5, seed=1),
    ),
    (
        laws.law_what_survivors_learnt_is_kept,
        Churn(learner=CountsNoPushOfOthers, kinds=OWNERS, world=5, seed=1),
    ),
    (
        laws.law_what_survivors_learnt_is_kept,
        Churn(learner=ForgetsLosses, kinds=LOSSES, world=5, codec=laws.LOSSY),
    ),
    (
        laws.law_what_survivors_learnt_is_kept,
        Churn(learner=TrustsItsLastMerges, kinds=("part",), world=5),
    ),
    (
        laws.law_rounds_go_on,
        Churn(learner=WaitsForItsOldPush, kinds=LOSSES, world=5, seed=1),
    ),
)
