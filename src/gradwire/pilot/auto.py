"""auto: a few dense steps that measure, then the best plan.

Predictions may not tell which of the best plans is fastest. So after the first plan's
steps, rival plans get some steps each, and the fastest plan is kept. Then ``auto``
watches three things:

* The time of a step, which ranks announce every few steps. If it has changed, ranks
  time a message. If the link has changed, they measure it and plan anew.
* The gain of the plan. Now and then a few steps are dense again. If the plan is not
  faster, gradients stay dense.
* The distance of means from dense means (`guard`). If it is more than the fidelity
  allows, the next stricter fidelity plans anew.

All ranks make each decision at the same step, from values that all of them have. Each
decision is described once in the log (as INFO, by rank 0), and in
``handle.stats()["pilot"]``.

A checkpoint holds the state of the plan in force and not the plan: a run that is
resumed measures and plans anew. Residuals of the old plan arrive with the first
gradients.
"""

from dataclasses import dataclass
from time import perf_counter as clock
from typing import Any

from ..contract.bounds import check_whole
from ..contract.units import format_seconds
from ..planning.data.cluster import Cluster
from ..planning.data.profile import Profile
from ..planning.planner.auto.judgement import MOST_ERROR, stricter
from ..runtime.controls import Controls, Flight, Pilot
from ._decisions import (
    GAIN,
    OFF,
    Decision,
    Move,
    Review,
    decide,
    is_worth,
    narrower,
    num_to_judge,
    wider,
)
from ._measured import MOST_REVIEWED, REVIEWED, MeasuredFlight, slowness
from ._planning import Chosen, Proposal, compressors_of, surveyed

_TRIAL = 3
"""Dense steps measured to compare, after two unmeasured: the first has residuals."""
_MOST_BETWEEN_TRIALS = 4096
_RIVAL = 6
"""The least steps that are measured of a rival."""
_GUARDED = 4
"""The steps between two comparisons of means with dense ones, over ``review_steps``."""


@dataclass(frozen=True, kw_only=True)
class auto(Pilot):
    """Chooses a plan while the model trains, and changes it when the network changes.

    ``gw.attach(model, "auto")`` uses the defaults. Dense steps are steps without
    compression.

    Args:
        fidelity: The compressors that are allowed. "exact": only those that lose
            nothing. "half": also values of 16 bits. "safe" (the default): those whose
            loss, in a measured training, was at most 1.01 times the loss of dense
            training. "any": all.
        measured_steps: The most dense steps in which layers are measured, after three
            steps of warm-up. Default: 6.
        review_steps: The least steps between two reviews, in which ranks compare the
            times of their steps; from 1, default 8. Of steps shorter than 0.06 s, up
            to 24 lie between two reviews.
        trial_steps: The steps until a plan is compared with dense steps, from 1;
            default 128. Each later comparison comes after twice as many steps. A plan
            with a small gain is compared at once.

    Raises:
        InvalidSetting: A value is out of range.

    >>> auto(fidelity="half")
    auto(fidelity='half', measured_steps=6, review_steps=8, trial_steps=128)
    """

    fidelity: str = "safe"
    measured_steps: int = 6
    review_steps: int = REVIEWED
    trial_steps: int = 128

    def __post_init__(self) -> None:
        compressors_of(self.fidelity)
        for name in ("measured_steps", "review_steps", "trial_steps"):
            check_whole(name, getattr(self, name), "leave it out")

    @property
    def compressors(self) -> tuple[str, ...]:
        return compressors_of(self.fidelity)

    def begin(self, controls: Controls) -> Flight:
        return _Watched(self, controls)


class _Watched(MeasuredFlight):
    """One model under ``auto``."""

    def __init__(self, settings: auto, controls: Controls) -> None:
        super().__init__(
            "auto", settings.measured_steps, settings.compressors, controls
        )
        self._settings = settings
        self._fidelity = settings.fidelity
        controls.guard(_GUARDED * settings.review_steps)
        self._error: float | None = None
        self._off = OFF
        self._was_off = False
        self._planned_s: float | None = None
        self._best: tuple[Proposal, float] | None = None
        self._between_trials = self._until_trial = settings.trial_steps

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "fidelity": self._fidelity}

    def step_ended(self) -> None:
        if not self._skipped:
            self._until_trial -= 1
        super().step_ended()

    def _num_judged(self) -> int:
        least = self._settings.review_steps
        most = MOST_REVIEWED
        if self._is_trial or self._best is not None:
            least = _TRIAL if self._is_trial else min(_RIVAL, least)
            most = MOST_REVIEWED // 2
        return num_to_judge(least, most, self._dense_s)

    def _choose(self, profile: Profile, cluster: Cluster) -> Chosen:
        return surveyed(self._fidelity, self._controls.can_overlap, profile, cluster)

    def _take(self, made: Proposal, prediction: str) -> None:
        """Goes over to the plan where it is worth it."""
        predicted_s = self._predicted_s(made.predicted_s)
        worth = made.plan is not None and is_worth(predicted_s, self._dense_s)
        self._best = self._planned_s = None
        self._go(made.plan if worth else None)
        self._between_trials = self._until_trial = self._settings.trial_steps
        self._say(
            prediction if worth else f"{prediction}: not worth it, gradients stay dense"
        )

    # Watching.

    def _review(self, rows: list[list[float]]) -> None:
        """Compares what steps take with what they took, and acts on it."""
        step_s = max(row[0] for row in rows)
        error = max(row[1] for row in rows)
        self._error = None if error < 0 else error
        decision = decide(self._reviewed(step_s, None))
        if decision.move is Move.PROBE:
            assert self._links is not None
            start_s = clock()
            with self._controls.on_all_channels() as engine:
                factor = slowness(engine, self._links)
            self._measuring_s += clock() - start_s
            self._skipped = 1
            decision = decide(self._reviewed(step_s, factor))
            self._off = OFF if decision.move is Move.PLAN else wider(self._off)
        elif decision.move is Move.STAY:
            self._off = narrower(self._off)
        self._was_off = decision.move is Move.WAIT
        self._act(decision, step_s)

    def _reviewed(self, step_s: float, slowness: float | None) -> Review:
        made = self._proposal
        return Review(
            is_planned=self._controls.plan is not None,
            is_trial=self._is_trial,
            step_s=step_s,
            expected_s=self._expected_s,
            dense_s=self._dense_s,
            planned_s=self._planned_s,
            rival_s=self._predicted_s(made.rivals[0][1])
            if made and made.rivals
            else None,
            best_s=None if self._best is None else self._best[1],
            slowness=slowness,
            off=self._off,
            was_off=self._was_off,
            is_trial_due=self._until_trial <= 0,
            error=self._error,
            allowed=MOST_ERROR[self._fidelity],
        )

    def _act(self, decision: Decision, step_s: float) -> None:
        if decision.why and decision.move not in (Move.TRY_RIVAL, Move.BACK):
            self._say(decision.why)
        match decision.move:
            case Move.EXPECT:
                self._expect(step_s)
            case Move.PLAN:
                self._plan_anew()
            case Move.STRICTER:
                self._fidelity = stricter(self._fidelity)
                self._plan()
            case Move.DENSE:
                if self._is_trial:
                    self._dense_s = step_s
                self._best = None
                self._go(None)
            case Move.TRY_RIVAL | Move.BACK:
                self._take_other(decision, step_s)
            case Move.TRY_DENSE:
                self._planned_s = step_s
                self._best = None
                self._go(None, is_trial=True)
            case Move.RETURN:
                self._return(step_s)

    def _expect(self, step_s: float) -> None:
        """Expects steps of ``step_s`` from now on."""
        self._best = None
        is_first = self._expected_s is None
        self._expected_s = step_s
        if self._controls.plan is None:
            self._dense_s = step_s
        elif is_first and self._proposal is not None:
            predicted_s = self._predicted_s(self._proposal.predicted_s)
            measured = f"a step by the plan takes {format_seconds(step_s)}"
            self._say(f"{measured}, {format_seconds(predicted_s)} was predicted")

    def _plan_anew(self) -> None:
        """Measures the links, and plans with them."""
        start_s = clock()
        self._measure_links()
        self._dense_s = 0.0
        self._plan()
        self._measuring_s += clock() - start_s

    def _return(self, step_s: float) -> None:
        """Goes back to the plan after uncompressed steps, which took ``step_s``."""
        assert self._proposal is not None
        self._dense_s = step_s
        self._between_trials = min(2 * self._between_trials, _MOST_BETWEEN_TRIALS)
        self._until_trial = self._between_trials
        self._go(self._proposal.plan)
        self._expected_s = self._planned_s

    def _take_other(self, decision: Decision, step_s: float) -> None:
        """Goes to the next rival, or to the best so far; steps took ``step_s``."""
        assert self._proposal is not None
        if decision.move is Move.BACK:
            assert self._best is not None
            self._proposal = self._best[0]._replace(rivals=())
            self._best = None
        else:
            if self._best is None or step_s < GAIN * self._best[1]:
                self._best = self._proposal, step_s
            self._proposal = self._proposal.next_rival()
        self._say(f"{decision.why} ({self._proposal.words})")
        self._go(self._proposal.plan)
