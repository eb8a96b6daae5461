"""A flight that begins with dense steps, which measure layers, links and codecs.

Behind the last of them rank 0 plans and announces the plan. From then on all ranks
review every few steps what a step takes. What is done with a plan, and with a review,
is a subclass's.

All ranks wait for the slowest of each step, so layers count as slower by the median of
these. Links count as slower by what dense steps take besides computation: messages in
training take longer than messages that are timed alone. Where ranks share cores, what
messages take of a layer's seconds is left out.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import median
from time import perf_counter as clock
from typing import Any, NamedTuple

import torch

from ..contract.units import format_rate, format_seconds
from ..errors import log
from ..measure.codecs import measure_codecs
from ..measure.layers import LayerWatch
from ..measure.links import all_reduce_s, measure_cluster, shared_cores
from ..planning.data.cluster import PRIMITIVES, Cluster, CodecFit, VerbName
from ..planning.data.fit import LineFit
from ..planning.data.plan import Plan
from ..planning.data.profile import Profile
from ..runtime.controls import Controls, Flight
from ..runtime.engine.engine import Engine, announced_meanwhile, figures_of_all
from ..runtime.engine.plain import announced_by
from ._decisions import num_to_judge, typical_s
from ._planning import Chosen, Proposal, proposal

VERBS: tuple[VerbName, ...] = ("all_reduce", "all_gather", "all_to_all")
MESSAGE_S = 0.04
"""Seconds that the largest message of a measurement takes, about."""
LEAST_BYTES = 2**16
MOST_BYTES = 2**22
BUDGET_S = 0.03
"""Seconds that one size of a verb, or of a compressor, may take, about."""
ROUNDS = 3
CODEC_SIZES = (2**12, 2**16, 2**20)
"""Few, as each is measured many times: from a bias to what no cache holds."""


class Links(NamedTuple):
    """The measured cluster, and the seconds that a message of some size took then."""

    cluster: Cluster
    size_bytes: int
    taken_s: float


def links_of(engine: Engine) -> Links:
    """The cluster by messages of up to 4 MiB, or of what the link carries in good time.

    Between training steps, so it takes a second or a few, whatever the link's rate. The
    largest message is found by sending: what short ones take says nothing of a link
    that passes some bytes at once after a pause.
    """
    all_reduce_s(engine, LEAST_BYTES, 1)
    largest = LEAST_BYTES
    taken_s = all_reduce_s(engine, LEAST_BYTES)
    while taken_s < MESSAGE_S and largest < MOST_BYTES:
        largest *= 2
        taken_s = all_reduce_s(engine, largest)
    shifted = (largest >> shift for shift in (8, 5, 2, 1, 0))
    sizes = [size for size in shifted if size >= 2**12]
    cluster = measure_cluster(
        engine, verbs=VERBS, sizes_bytes=sizes, budget_s=BUDGET_S, rounds=ROUNDS
    )
    return Links(cluster, largest // 2, all_reduce_s(engine, largest // 2))


def slowness(engine: Engine, known: Links) -> float:
    """The seconds of a message over those that it took when the links were measured."""
    return all_reduce_s(engine, known.size_bytes) / known.taken_s


class SharedLayers(NamedTuple):
    """The layers' seconds that are planned with.

    No profile where no rank saw a whole step.
    """

    profile: Profile | None
    other_s: float
    """Seconds of a step beside layers and the exchange."""
    dense_s: float
    """Seconds of a step on the slowest rank."""


def shared_layers(engine: Engine, layers: LayerWatch, step_s: float) -> SharedLayers:
    """The layers of the rank that computes longest, as the others wait for it.

    In another step another rank may be the slowest. So the layers count as slower, by
    what all ranks waited for in each step. ``step_s`` are the typical seconds of this
    rank's steps.
    """
    own_profile = layers.profile() if layers.num_steps else None
    own_s = (
        -1.0 if own_profile is None else own_profile.forward_s + own_profile.backward_s
    )
    figures = [own_s, step_s, *computing_s(engine, layers.seconds)]
    rows = figures_of_all(engine, figures)
    dense_s = max(row[1] for row in rows)
    slowest = max(range(engine.world), key=lambda rank: rows[rank][0])
    if rows[slowest][0] < 0:
        return SharedLayers(None, 0.0, dense_s)
    mine = (
        None
        if own_profile is None
        else {"profile": own_profile.to_json(), "other_s": layers.other_s}
    )
    announced = announced_by(engine, slowest, mine)
    profile = Profile.parse(announced["profile"], "layers")
    other_s = announced["other_s"]
    whole_s = other_s + profile.forward_s + profile.backward_s
    computing = (row[2:] for row in rows)
    longest_s = [max(step) for step in zip(*computing, strict=True)]
    factor = median(filter(None, longest_s)) / whole_s if whole_s else 1.0
    return SharedLayers(profile.slower(factor), factor * other_s, dense_s)


def computing_s(engine: Engine, steps_s: Sequence[tuple[float, float]]) -> list[float]:
    """Seconds that this rank computed in each step, as if messages had taken none.

    ``steps_s`` has the seconds of each step, and in how many of them a core worked for
    it. Where ranks share cores, the rest of these passed while others had them, and
    messages did, which cost extra.
    """
    cores = shared_cores(partial(figures_of_all, engine))
    if cores is None:
        return [step_s for step_s, _ in steps_s]
    stretch = torch.get_num_threads() / cores
    return [min(step_s, stretch * core_s) for step_s, core_s in steps_s]


def codecs_of(
    engine: Engine, compressors: tuple[str, ...], world: int
) -> dict[str, CodecFit]:
    """The costs of compressors, each figure the median of all ranks."""
    if not compressors:
        return {}
    costs = _own_codecs(compressors, world, torch.get_num_threads())
    lines = [getattr(costs[name], key) for name in compressors for key in PRIMITIVES]
    figures = [figure for line in lines for figure in (line.alpha_s, line.per_unit_s)]
    return median_codecs(compressors, figures_of_all(engine, figures))


def median_codecs(
    compressors: Sequence[str], rows: Sequence[Sequence[float]]
) -> dict[str, CodecFit]:
    """The costs of compressors by each rank's figures: two a line, line after line."""
    figures = iter([median(those) for those in zip(*rows, strict=True)])
    return {
        name: CodecFit(
            **{
                key: LineFit(alpha_s=next(figures), per_unit_s=next(figures))
                for key in PRIMITIVES
            }
        )
        for name in compressors
    }


@cache
def _own_codecs(
    compressors: tuple[str, ...], world: int, threads: int
) -> dict[str, CodecFit]:
    """The costs of compressors on this machine, measured once by each process."""
    return measure_codecs(
        compressors, world=world, sizes=CODEC_SIZES, budget_s=BUDGET_S
    )


_WARM_UP = 3
"""The first steps, in which kernels are built and memory is touched.

They are not measured.
"""
_LONG_S = 1.0
_ENOUGH_S = 3.0
"""Seconds of a step after which there is no more warm-up, and of two or more measured
steps after which there are no more of these: on a slow link dense steps are dear.
"""
REVIEWED = 8
MOST_REVIEWED = 24
"""The least steps between two reviews, and the most unless more are asked for."""


class MeasuredFlight(Flight):
    """One model, measured for so many ``steps`` at most.

    ``name`` begins each decision's text.

    ``codecs`` are the names of compressors whose costs are measured.
    """

    def __init__(
        self, name: str, steps: int, codecs: Sequence[str], controls: Controls
    ) -> None:
        self._name = name
        self._measured_steps = steps
        self._controls = controls
        self._compressors = tuple(codecs)
        self._num_steps = 0
        self._skipped = _WARM_UP
        self._steps_s: list[float] = []
        self._last_s = clock()
        self._announced: Callable[[], list[list[float]]] | None = None
        self._layers: LayerWatch | None = None
        self._profile: Profile | None = None
        self._other_s = 0.0
        self._dense_s = 0.0
        self._measured_s = 0.0
        self._measuring_s = 0.0
        self._correction = 1.0
        self._link_factor = 1.0
        self._links: Links | None = None
        self._cluster: Cluster | None = None
        self._proposal: Proposal | None = None
        self._is_trial = False
        self._expected_s: float | None = None
        self.decisions: list[str] = []

    @abstractmethod
    def _choose(self, profile: Profile, cluster: Cluster) -> Chosen:
        """Plans, on rank 0."""

    @abstractmethod
    def _take(self, made: Proposal, prediction: str) -> None:
        """Acts on the plan that rank 0 has made; ``prediction`` explains it."""

    @abstractmethod
    def _review(self, rows: list[list[float]]) -> None:
        """Acts on seconds of a step, and errors of means (or -1), of all ranks."""

    def stats(self) -> dict[str, Any]:
        links = self._links
        made = self._proposal
        is_planned = self._controls.plan is not None
        predicted_s = None
        if made is not None:
            is_by_plan = is_planned or self._is_trial
            predicted_s = made.predicted_s if is_by_plan else made.dense_s
            predicted_s = self._predicted_s(predicted_s)
        return {
            "decisions": list(self.decisions),
            "is_planned": is_planned,
            "step_s": self._expected_s,
            "dense_s": self._dense_s or None,
            "predicted_s": predicted_s,
            "rate_bytes_per_s": None
            if links is None
            else links.cluster.rate_bytes_per_s,
            "measuring_s": self._measuring_s,
        }

    def _predicted_s(self, iteration_s: float) -> float:
        """Seconds of a step whose exchange and layers are to take ``iteration_s``.

        The optimizer's share is added, and all is corrected by what dense steps took
        and their messages do not explain (``link_factor``): a machine that is slower is
        so for any plan.
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
            # residuals of the plan before may be in these means
            self._controls.missed()
        else:
            self._steps_s.append(taken_s)
        if self._cluster is None:
            self._measure(taken_s)
        elif (announced := self._announced) is not None:
            self._announced = None
            self._review(announced())
        elif len(self._steps_s) >= self._num_judged():
            self._announced = self._announce(typical_s(self._steps_s))
            self._steps_s.clear()
        self._last_s = clock()

    def _num_judged(self) -> int:
        """The steps that are judged together, the same on all ranks."""
        return num_to_judge(REVIEWED, MOST_REVIEWED, self._dense_s)

    def _announce(self, own_s: float) -> Callable[[], list[list[float]]]:
        """Has ranks announce step times beside the next step: nobody waits."""
        missed = self._controls.missed()
        return announced_meanwhile(
            self._controls.engine, [own_s, -1.0 if missed is None else missed]
        )

    # Measuring.

    def _measure(self, taken_s: float) -> None:
        """Measures layers step by step.

        After the last of these steps links, and plans.
        """
        controls = self._controls
        engine = self._controls.engine
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
        if num_steps < self._measured_steps and not is_enough:
            return
        layers = self._layers
        self._layers = None
        layers.remove()
        start_s = clock()
        shared = shared_layers(engine, layers, typical_s(self._steps_s))
        self._profile = shared.profile
        self._other_s = shared.other_s
        self._dense_s = shared.dense_s
        self._measure_links()
        self._plan()
        self._measuring_s += clock() - start_s

    def _measure_links(self) -> None:
        controls = self._controls
        with controls.on_all_channels() as engine:
            self._links = links_of(engine)
            num_hosts = engine.world // engine.ranks_per_host
            # Where there is one host, nothing is sent that could be compressed.
            names = self._compressors if num_hosts > 1 else ()
            codecs = codecs_of(engine, names, num_hosts)
        # as dense steps have shown before
        known = self._links.cluster.slower(self._link_factor)
        self._cluster = known.model_copy(update={"codecs": codecs})

    # Planning.

    def _plan(self) -> None:
        """Has rank 0 plan, and acts on its plan."""
        engine = self._controls.engine
        assert self._cluster is not None
        assert self._links is not None
        if self._profile is None:
            self._go(None)
            self._say(
                "no forward pass of the model was seen with gradients enabled, so "
                "nothing is planned and gradients stay dense: call the model's modules "
                "themselves, and put no reentrant checkpoint around the whole model "
                "(use_reentrant=False is seen)",
                level=logging.WARNING,
            )
            return
        announced = None
        if engine.rank == 0:
            taken_s = self._dense_s - self._other_s if self._dense_s else None
            announced = proposal(
                self._profile, self._cluster, self._choose, taken_s=taken_s
            ).announced()
        made = self._proposal = Proposal.of(announced_by(engine, 0, announced))
        self._cluster = self._cluster.slower(made.link_factor)
        self._link_factor *= made.link_factor
        if self._dense_s:
            self._correction = self._dense_s / (made.dense_s + self._other_s)
        else:
            self._dense_s = self._predicted_s(made.dense_s)
        self._take(
            made,
            f"links carry {format_rate(self._links.cluster.rate_bytes_per_s)}, a dense "
            f"step takes {format_seconds(self._dense_s)}, and by plan ({made.words}) "
            f"{format_seconds(self._predicted_s(made.predicted_s))} are predicted",
        )

    def _go(self, plan: Plan | None, *, is_trial: bool = False) -> None:
        """Goes over to a plan, or to dense messages."""
        self._is_trial = is_trial
        assert self._cluster is not None
        self._controls.know(self._cluster)
        if plan is not self._controls.plan:
            self._controls.switch(plan)
        self._steps_s.clear()
        self._skipped = 2
        self._expected_s = None

    def _say(self, sentence: str, *, level: int = logging.INFO) -> None:
        self.decisions.append(f"step {self._num_steps}: {sentence}")
        if self._controls.engine.rank == 0:
            log.log(level, "%s, %s", self._name, self.decisions[-1])
