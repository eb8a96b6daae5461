"""auto: a few dense steps while layers, links and codecs are measured, then the best plan for them.

The plan's first steps are followed by some by each of a few rivals, which may be as fast for all
that predictions say, and the fastest is kept. After that it watches. Every few steps ranks
tell each other what a step took. Where that has changed they time a message: if the link is another
one, it is measured and planned for anew. Now and then a few steps are dense again, to see whether
the plan still gains; if it does not, gradients stay dense. Where means are further from dense ones
than the fidelity allows (`guard`), the next stricter fidelity plans anew. Each decision is made
from what all ranks share, at the same step on all of them, and is said once in words: in the log
(as INFO, by rank 0) and in ``handle.stats()["pilot"]``.

A checkpoint holds the state of the plan in force and not the plan: a run that is resumed measures
and plans anew. Residuals of the old plan arrive with the first gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter as clock
from typing import Any

from ...contract.bounds import check_whole
from ...contract.units import format_rate, format_seconds
from ...planning.data.cluster import Cluster
from ...planning.data.plan import Plan
from ...planning.data.profile import Profile
from ...planning.judgement import MOST_ERROR, stricter
from ...planning.measure.codecs import median_pace
from ...planning.measure.layers import LayerWatch
from ..controls import Controls, Flight, Pilot
from ..state.plain import told_by
from ..step.engine import figures_of_all, told_meanwhile
from . import _measuring as measuring
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
    typical_s,
    wider,
)
from ._planning import Proposal, compressors_of, proposal

_log = logging.getLogger("gradwire")
_WARM_UP = 3
"""The first steps, in which kernels are built and memory is touched; they are not measured."""
_LONG_S, _ENOUGH_S = 1.0, 3.0
"""Seconds of a step after which there is no more warm-up, and of two or more measured steps after
which there are no more of these: on a slow link dense steps are dear."""
_TRIAL = 3
"""Dense steps that are measured to compare, behind two that are not: the first of these delivers
residuals."""
_MOST_BETWEEN_TRIALS = 4096
_PACE_S = 0.02
"""Seconds of each of the ten turns in which the pace beside a busy lane is measured."""
_RIVAL = 6
"""The least steps that are measured of a rival."""
_GUARDED = 4
"""The steps between two comparisons of means with dense ones, over ``review_steps``."""
_MOST_REVIEWED = 24
"""The most steps between two reviews, unless more are asked for."""


@dataclass(frozen=True, kw_only=True)
class auto(Pilot):
    """Chooses a plan while the model trains, and changes it when the network changes.

    ``gw.attach(model, "auto")`` uses the defaults.

    Args:
        fidelity: The compressors that are allowed. "exact": none that loses bits. "half": 16 bits
            too. "safe": compressors that trained to 1.01 of the dense loss. "any": all.
        measured_steps: The most dense steps in which layers are measured, after three of warm-up.
        review_steps: Steps between two comparisons of step times among ranks. Short steps are
            compared every 24.
        trial_steps: Steps until a plan is compared with dense steps. Each later comparison comes
            after twice as many. A plan with a small gain is compared at once.

    Raises:
        InvalidSetting: A value is out of range.

    >>> auto(fidelity="half")
    auto(fidelity='half', measured_steps=6, review_steps=8, trial_steps=128)
    """

    fidelity: str = "safe"
    measured_steps: int = 6
    review_steps: int = 8
    trial_steps: int = 128

    def __post_init__(self) -> None:
        compressors_of(self.fidelity)
        for name in ("measured_steps", "review_steps", "trial_steps"):
            check_whole(name, getattr(self, name), "leave it out")

    def begin(self, controls: Controls) -> Flight:
        return _Watched(self, controls)


class _Watched(Flight):
    """One model under ``auto``."""

    def __init__(self, settings: auto, controls: Controls) -> None:
        self._settings, self._controls = settings, controls
        self._fidelity = settings.fidelity
        controls.guard(_GUARDED * settings.review_steps)
        self._num_steps, self._skipped = 0, _WARM_UP
        self._steps_s: list[float] = []
        self._last_s = clock()
        self._told: Callable[[], list[list[float]]] | None = None
        self._layers: LayerWatch | None = None
        self._profile: Profile | None = None
        self._other_s = self._dense_s = self._measured_s = self._measuring_s = 0.0
        self._correction = self._link_factor = 1.0
        self._links: measuring.Links | None = None
        self._cluster: Cluster | None = None
        self._proposal: Proposal | None = None
        self._is_trial = False
        self._error: float | None = None
        self._off, self._was_off = OFF, False
        self._expected_s: float | None = None
        self._planned_s: float | None = None
        self._best: tuple[Proposal, float] | None = None
        self._between_trials = self._until_trial = settings.trial_steps
        self.decisions: list[str] = []

    def stats(self) -> dict[str, Any]:
        links, made = self._links, self._proposal
        is_planned = self._controls.plan is not None
        return {
            "decisions": list(self.decisions),
            "fidelity": self._fidelity,
            "is_planned": is_planned,
            "step_s": self._expected_s,
            "dense_s": self._dense_s or None,
            "predicted_s": None
            if made is None
            else self._predicted_s(
                made.predicted_s if is_planned or self._is_trial else made.dense_s
            ),
            "rate_bytes_per_s": None if links is None else links.cluster.rate_bytes_per_s,
            "measuring_s": self._measuring_s,
        }

    def _predicted_s(self, iteration_s: float) -> float:
        """Seconds of a step whose exchange and layers are to take ``iteration_s``.

        The optimizer's share is added, and all is corrected by what dense steps took and their
        messages do not explain (``link_factor``): a machine that is slower is so for any plan.
        """
        return self._correction * (iteration_s + self._other_s)

    def end(self) -> None:
        if self._layers is not None:
            self._layers.remove()
            self._layers = None

    def step_ended(self) -> None:
        taken_s = clock() - self._last_s
        self._num_steps += 1
        if self._skipped:
            self._skipped -= 1
            self._controls.missed()  # residuals of the plan before may be in these means
        else:
            self._steps_s.append(taken_s)
            self._until_trial -= 1
        if self._cluster is None:
            self._measure(taken_s)
        elif self._told is not None:
            told, self._told = self._told, None
            self._review(told())
        elif len(self._steps_s) >= self._num_judged():
            self._told = self._tell(typical_s(self._steps_s))
            self._steps_s.clear()
        self._last_s = clock()

    def _num_judged(self) -> int:
        """The steps that are judged together, the same on all ranks."""
        least, most = self._settings.review_steps, _MOST_REVIEWED
        if self._is_trial or self._best is not None:
            least = _TRIAL if self._is_trial else min(_RIVAL, least)
            most = _MOST_REVIEWED // 2
        return num_to_judge(least, most, self._dense_s)

    # Measuring.

    def _measure(self, taken_s: float) -> None:
        """Measures layers step by step; after the last of these steps links, and plans."""
        controls, engine = self._controls, self._controls.engine
        if engine.world == 1:
            self._steps_s.clear()
            if self._num_steps == 1:
                self._say("there is one rank, which exchanges nothing")
            return
        longest_s = max(row[0] for row in figures_of_all(engine, [taken_s]))
        if self._layers is None:
            if self._num_steps >= _WARM_UP or longest_s >= _LONG_S:
                self._layers = LayerWatch(controls.model, controls.params, controls.ddp)
                self._layers.step_ended()
                self._skipped = 0
            return
        self._layers.step_ended()
        self._measured_s += longest_s
        num_steps = len(self._steps_s)
        is_enough = num_steps > 1 and self._measured_s >= _ENOUGH_S
        if num_steps < self._settings.measured_steps and not is_enough:
            return
        layers, self._layers = self._layers, None
        layers.remove()
        start_s = clock()
        shared = measuring.shared_layers(engine, layers, typical_s(self._steps_s))
        self._profile, self._other_s, self._dense_s = shared
        self._measure_links()
        self._plan()
        self._measuring_s += clock() - start_s

    def _measure_links(self) -> None:
        controls = self._controls
        with controls.on_all_channels() as engine:
            self._links = measuring.links(engine)
            num_hosts = engine.world // engine.ranks_per_host
            # Where there is one host, nothing is sent that could be compressed.
            names = compressors_of(self._fidelity) if num_hosts > 1 else ()
            codecs = measuring.codecs(engine, names, num_hosts)
            beside = median_pace(engine, budget_s=_PACE_S) if names else 1.0
        figures = {"codecs": codecs, "beside": beside}
        known = self._links.cluster.slower(self._link_factor)  # as dense steps have shown before
        self._cluster = known.model_copy(update=figures)

    # Planning.

    def _plan(self) -> None:
        """Has rank 0 plan, and goes over to the plan where it is worth it."""
        controls, engine = self._controls, self._controls.engine
        assert self._cluster is not None
        assert self._links is not None
        if self._profile is None:
            self._go(None)
            self._say(
                "no forward pass of the model was seen with gradients enabled, so nothing is "
                "planned and gradients stay dense: call the model's modules themselves, and put no "
                "reentrant checkpoint around the whole model (use_reentrant=False is seen)",
                level=logging.WARNING,
            )
            return
        own = None
        if engine.rank == 0:
            given = self._profile, self._cluster, self._fidelity
            taken_s = self._dense_s - self._other_s if self._dense_s else None
            own = proposal(*given, overlap_forward=controls.can_overlap, taken_s=taken_s)
        made = self._proposal = Proposal.of(told_by(engine, 0, own and own.told()))
        self._cluster = self._cluster.slower(made.link_factor)
        self._link_factor *= made.link_factor
        if self._dense_s:
            self._correction = self._dense_s / (made.dense_s + self._other_s)
        else:
            self._dense_s = self._predicted_s(made.dense_s)
        predicted_s = self._predicted_s(made.predicted_s)
        told = (
            f"links carry {format_rate(self._links.cluster.rate_bytes_per_s)}, a dense step takes "
            f"{format_seconds(self._dense_s)}, and by plan ({made.words}) "
            f"{format_seconds(predicted_s)} are predicted"
        )
        worth = made.plan is not None and is_worth(predicted_s, self._dense_s)
        self._best = self._planned_s = None
        self._go(made.plan if worth else None)
        self._between_trials = self._until_trial = self._settings.trial_steps
        self._say(told if worth else f"{told}: not worth it, gradients stay dense")

    def _go(self, plan: Plan | None, *, is_trial: bool = False) -> None:
        """Goes over to a plan, or to dense messages."""
        self._is_trial = is_trial
        assert self._cluster is not None
        self._controls.know(self._cluster)
        if plan is not self._controls.plan:
            self._controls.switch(plan)
        self._steps_s.clear()
        self._skipped, self._expected_s = 2, None

    # Watching.

    def _tell(self, own_s: float) -> Callable[[], list[list[float]]]:
        """Has ranks tell each other what steps take, beside the next one, so that nobody waits."""
        missed = self._controls.missed()
        return told_meanwhile(self._controls.engine, [own_s, -1.0 if missed is None else missed])

    def _review(self, rows: list[list[float]]) -> None:
        """Compares what steps take with what they took, and acts on it."""
        step_s, error = map(max, zip(*rows, strict=True))
        self._error = None if error < 0 else error
        decision = decide(self._reviewed(step_s, None))
        if decision.move is Move.PROBE:
            decision = decide(self._reviewed(step_s, self._slowness()))
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
            rival_s=self._predicted_s(made.rivals[0][1]) if made and made.rivals else None,
            best_s=None if self._best is None else self._best[1],
            slowness=slowness,
            off=self._off,
            was_off=self._was_off,
            is_trial_due=self._until_trial <= 0,
            error=self._error,
            allowed=MOST_ERROR[self._fidelity],
        )

    def _slowness(self) -> float:
        assert self._links is not None
        start_s = clock()
        with self._controls.on_all_channels() as engine:
            found = measuring.slowness(engine, self._links)
        self._measuring_s += clock() - start_s
        self._skipped = 1
        return found

    def _act(self, decision: Decision, step_s: float) -> None:
        if decision.why and decision.move not in (Move.TRY_RIVAL, Move.BACK):
            self._say(decision.why)
        match decision.move:
            case Move.EXPECT:
                self._expect(step_s)
            case Move.PLAN:
                start_s = clock()
                self._measure_links()
                self._dense_s = 0.0
                self._plan()
                self._measuring_s += clock() - start_s
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
                self._planned_s, self._best = step_s, None
                self._go(None, is_trial=True)
            case Move.RETURN:
                assert self._proposal is not None
                self._dense_s = step_s
                self._between_trials = min(2 * self._between_trials, _MOST_BETWEEN_TRIALS)
                self._until_trial = self._between_trials
                self._go(self._proposal.plan)
                self._expected_s = self._planned_s

    def _take_other(self, decision: Decision, step_s: float) -> None:
        """Goes over to the next rival, or to the best so far; this plan's steps took ``step_s``."""
        assert self._proposal is not None
        if decision.move is Move.BACK:
            assert self._best is not None
            self._proposal, self._best = self._best[0]._replace(rivals=()), None
        else:
            if self._best is None or step_s < GAIN * self._best[1]:
                self._best = self._proposal, step_s
            self._proposal = self._proposal.next_rival()
        self._say(f"{decision.why} ({self._proposal.words})")
        self._go(self._proposal.plan)

    def _expect(self, step_s: float) -> None:
        self._best = None
        is_first, self._expected_s = self._expected_s is None, step_s
        if self._controls.plan is None:
            self._dense_s = step_s
        elif is_first and self._proposal is not None:
            predicted_s = self._predicted_s(self._proposal.predicted_s)
            told = f"a step by the plan takes {format_seconds(step_s)}"
            self._say(f"{told}, {format_seconds(predicted_s)} was predicted")

    def _say(self, sentence: str, *, level: int = logging.INFO) -> None:
        self.decisions.append(f"step {self._num_steps}: {sentence}")
        if self._controls.engine.rank == 0:
            _log.log(level, "auto, %s", self.decisions[-1])
