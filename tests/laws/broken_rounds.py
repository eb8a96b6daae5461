"""Deliberately wrong partial rounds, and the law that must reject each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.compress.topk import topk
from gradwire.exchange.rounds import (
    Answer,
    FragmentLearner,
    FragmentOwner,
    Merge,
    PartialRounds,
    Pull,
    Push,
    Request,
    Rest,
    Rules,
)
from tests.laws import rounds_laws as laws
from tests.laws.rounds_laws import Conditions


class OverwritesParameters(FragmentLearner):
    """Parameters become the anchor, whatever is in no merge yet."""

    def take(self, merge: Merge, param_N: Tensor) -> bool:
        is_new = super().take(merge, param_N)
        if is_new:
            param_N.copy_(self.anchor_N)
        return is_new


class LearnsItsPushAgain(FragmentLearner):
    """What a merge holds stays in the parameters beside the anchor."""

    def push(self, param_N: Tensor, step: int) -> Push:
        made = super().push(param_N, step)
        self.pushed_N = torch.zeros_like(param_N)
        return made


class KeepsNoResidual(FragmentLearner):
    def push(self, param_N: Tensor, step: int) -> Push:
        made = super().push(param_N, step)
        assert self.codec.residual_N is not None
        self.codec.residual_N.zero_()
        return made


class KeepsTheLossOfWhatCameBack(FragmentLearner):
    """A push that goes back is in the parameters, and its loss in the residual too."""

    def take(self, merge: Merge, param_N: Tensor) -> bool:
        before_N = self.codec.residual_N.clone()  # type: ignore[union-attr]
        is_back = any(c.rank == self.rank and not c.weight for c in merge[2])
        is_new = super().take(merge, param_N)
        if is_new and is_back:
            self.codec.residual_N.copy_(before_N)  # type: ignore[union-attr]
        return is_new


class ForgetsTheLossOfTheMean(FragmentOwner):
    def close(self) -> Merge:
        made = super().close()
        assert self.codec.residual_N is not None
        self.codec.residual_N.zero_()
        return made


class StepsByItsOwn(FragmentLearner):
    """A rank steps by half of its own push in place of half of the mean."""

    def take(self, merge: Merge, param_N: Tensor) -> bool:
        own = self.pushed
        if own is None or merge.version <= self.version:
            return super().take(merge, param_N)
        half_N = self.codec.decode(own.payload_B) / 2
        step = self._outer.step
        self._outer.step = lambda mean_N: step(mean_N / 2 + half_N)  # type: ignore[method-assign]
        is_new = super().take(merge, param_N)
        self._outer.step = step  # type: ignore[method-assign]
        return is_new


class CountsItselfIn(PartialRounds):
    """A rank writes itself into the lists that it hears of."""

    def receive(self, message: Request | Answer, now_s: float) -> list[Answer]:
        if isinstance(message, Merge):
            entries = [
                c._replace(age=0) if c.rank == self.rank else c
                for c in message.contributions
            ]
            message = message._replace(contributions=tuple(entries))
        return super().receive(message, now_s)


class ClosesAgain(FragmentOwner):
    """A push that comes too late makes the round's list longer, after it is sent."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.last: Merge | None = None

    def close(self) -> Merge:
        self.last = super().close()
        return self.last

    def take(self, push: Push, now_s: float) -> list[Answer]:
        answers = super().take(push, now_s)
        if answers or self.last is None or push.version == self.version:
            return answers
        entries = (*self.last.contributions, self._entry(push))
        return [self.last._replace(contributions=entries)]


class CountsRepeats(FragmentOwner):
    """A push that arrives twice is taken twice."""

    def take(self, push: Push, now_s: float) -> list[Answer]:
        self._numbers[push.rank] = 0
        return super().take(push, now_s)


class MergesAgain(FragmentOwner):
    """Pushes stay at the owner once they are merged."""

    def close(self) -> Merge:
        pushes = self.pushes
        made = super().close()
        self.pushes = pushes
        return made


class OpensForAnyone(FragmentOwner):
    """Any push opens a round, so that a fast link makes periods short."""

    def take(self, push: Push, now_s: float) -> list[Answer]:
        return super().take(push._replace(opens=True, version=self.version), now_s)


class NoticesNoSilence(FragmentOwner):
    """Rounds close however long a rank makes no step."""

    @property
    def is_held(self) -> bool:
        return self.is_sending


class OpensAtOnce(FragmentLearner):
    """A rank whose push came late opens the next round with its next step."""

    @property
    def may_open(self) -> bool:
        return self.pushed is not None


class OpensNothing(FragmentLearner):
    """A rank whose push came late waits for others to open the next round."""

    @property
    def may_open(self) -> bool:
        return False


class AsksNobody(FragmentOwner):
    """A slow rank counts its steps anew with each round, and pushes never."""

    def take(self, push: Push, now_s: float) -> list[Answer]:
        return [a for a in super().take(push, now_s) if not isinstance(a, Pull)]


class HearsOldPulls(FragmentLearner):
    """A pull for a closed round has a rank push before it may open the next one."""

    def ask(self, pull: Pull) -> None:
        self.is_asked = True


class AddsAsTheyCome(FragmentOwner):
    """Pushes are added in the order in which they came."""

    def close(self) -> Merge:
        pushes = [*self.pushes.values()]
        ranks = dict(enumerate(pushes))
        self.pushes = {
            place: push._replace(rank=place) for place, push in ranks.items()
        }
        made = super().close()
        entries = [
            entry._replace(rank=ranks[entry.rank].rank) for entry in made.contributions
        ]
        by_rank = sorted(entries, key=lambda entry: entry.rank)
        return made._replace(contributions=tuple(by_rank))


class EndsWithoutTheOthers(FragmentOwner):
    """The last round closes with its quorum, as all others do."""

    def begin_last(self) -> None:
        super().begin_last()
        self.closes_at_s = 0.0


class EndsWithItsOldPush(FragmentLearner):
    """A rank leaves what it has learnt since its push out of the last round."""

    def push(self, param_N: Tensor, step: int) -> Push:
        made = super().push(param_N, step)
        self.pushed_N = self.pushed_N / 2
        return made


class SaysThatAllIsThere(FragmentLearner):
    """A rank has the last round close without what it has learnt since its push."""

    def rest(self, param_N: Tensor, step: int) -> Request:
        return Rest(self.fragment, self.rank, self._epoch.number)


class DropsEarlierPushes(FragmentOwner):
    """The last round leaves pushes out that came before it."""

    def begin_last(self) -> None:
        super().begin_last()
        self.pushes = {}


class LoadsNoResidual(FragmentLearner):
    """What was not sent before a save is lost."""

    def load(self, saved: dict[str, Any]) -> None:
        super().load(saved)
        assert self.codec.residual_N is not None
        self.codec.residual_N.zero_()


class SavesNoPushes(FragmentOwner):
    """A state leaves out the pushes that wait at an owner."""

    def state(self) -> dict[str, Any]:
        return {**super().state(), "pushes": []}


QUICK = Rules(quorum=1, every=4)
LATE = Rules(quorum=1, every=4, most_age=0)
NEAR = Rules(quorum=1, every=4, most_waiting=1)
PATIENT = Rules(quorum=2, every=4, grace_s=0.3)

LOSSY = topk(density=0.3)

Bite = tuple[Callable[[Conditions], None], Conditions]
BITES: tuple[Bite, ...] = (
    (laws.law_nothing_learnt_is_lost, Conditions(learner=OverwritesParameters)),
    (laws.law_nothing_learnt_is_lost, Conditions(learner=LearnsItsPushAgain)),
    (
        laws.law_nothing_learnt_is_lost,
        Conditions(learner=KeepsNoResidual, codec=LOSSY),
    ),
    (
        laws.law_nothing_learnt_is_lost,
        Conditions(learner=KeepsTheLossOfWhatCameBack, codec=LOSSY, rules=LATE),
    ),
    (
        laws.law_nothing_learnt_is_lost,
        Conditions(owner=ForgetsTheLossOfTheMean, codec=LOSSY),
    ),
    (laws.law_anchors_have_the_same_bits, Conditions(learner=StepsByItsOwn)),
    (
        laws.law_all_have_the_same_list,
        Conditions(rounds=CountsItselfIn, rules=QUICK),
    ),
    (laws.law_no_round_closes_twice, Conditions(owner=ClosesAgain, rules=QUICK)),
    (laws.law_no_push_counts_twice, Conditions(owner=CountsRepeats, rules=PATIENT)),
    (laws.law_no_push_counts_twice, Conditions(owner=MergesAgain, rules=PATIENT)),
    (laws.law_a_round_takes_its_steps, Conditions(owner=OpensForAnyone, rules=QUICK)),
    (
        laws.law_a_round_takes_its_steps,
        Conditions(learner=OpensAtOnce, rules=QUICK, pauses=True, seed=2),
    ),
    (
        laws.law_every_rank_is_in,
        Conditions(learner=OpensNothing, rules=QUICK, pauses=True, seed=2),
    ),
    (
        laws.law_few_merges_wait_for_a_rank,
        Conditions(owner=NoticesNoSilence, rules=NEAR, pauses=True),
    ),
    (laws.law_every_rank_is_in, Conditions(owner=AsksNobody, rules=QUICK)),
    (
        laws.law_every_rank_is_in,
        Conditions(learner=HearsOldPulls, rules=QUICK, pauses=True, world=2),
    ),
    (
        laws.law_a_last_round_takes_all_in,
        Conditions(owner=EndsWithoutTheOthers, rules=QUICK),
    ),
    (laws.law_a_last_round_takes_all_in, Conditions(learner=EndsWithItsOldPush)),
    (
        laws.law_a_last_round_takes_all_in,
        Conditions(learner=SaysThatAllIsThere, rules=QUICK),
    ),
    (
        laws.law_a_last_round_takes_all_in,
        Conditions(owner=DropsEarlierPushes, rules=PATIENT),
    ),
    (
        laws.law_a_saved_state_goes_on,
        Conditions(learner=LoadsNoResidual, codec=LOSSY, rules=QUICK),
    ),
    (laws.law_a_saved_state_goes_on, Conditions(owner=SavesNoPushes, rules=PATIENT)),
    (laws.law_a_tape_gives_the_same_bits, Conditions(owner=AddsAsTheyCome, world=5)),
)
