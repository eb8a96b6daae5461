"""by_planner: a few dense steps that measure, then the plan of one planner.

Source: SSFusion (ICDE 2026), "Online profiling": the first five iterations; HiPress
    (IEEE TPDS 2023), section 3.3: curves of compression and network are measured, then
    a gradient's best setting follows.
Differences from the papers: rank 0 plans for what all ranks have measured, and tells
    the others. Nothing is compared with other plans, and nothing is planned anew:
    ``auto`` does both. Compressors are measured with their default settings.

The planner is tried once at ``attach``, with the model's tensors and figures of no
meaning: what it refuses, it refuses there on every rank. What it refuses of measured
figures leaves gradients dense, with a warning. A checkpoint holds the state of the plan
in force and not the plan, as ``auto``'s.
"""

import inspect
import logging
from typing import Any

from ..contract.bounds import check_whole
from ..contract.registry import load, names
from ..contract.units import format_seconds
from ..errors import invalid
from ..planning.data.cluster import PRIMITIVES, Cluster, CodecFit, Host
from ..planning.data.fit import LineFit
from ..planning.data.profile import Profile
from ..planning.make_plan import plan
from ..planning.planner_settings import with_settings
from ..planning.price import iteration_s
from ..runtime.controls import Controls, Flight, Pilot
from ..runtime.grid.reals import as_reals
from ..runtime.planned import stated_profile
from ._measured import MeasuredFlight
from ._planning import Chosen, Proposal


class by_planner(Pilot):
    """Measures while the model trains, then plans by one planner and keeps to its plan.

    ``gw.attach(model, "mgwfbp")`` uses the planner's defaults.

    Args:
        planner: The planner's name (``gradwire list planner`` shows all). It has to be
            given: the default, an empty name, is refused.
        measured_steps: The most dense steps in which layers are measured, after three
            of warm-up. Default: 6.
        **settings: The planner's settings.

    Raises:
        UnknownName: There is no such planner or setting.
        InvalidSetting: A value is out of range, or the planner needs what is not
            measured here.

    >>> by_planner("ddp", bucket_bytes=4096)
    by_planner('ddp', measured_steps=6, bucket_bytes=4096)
    """

    def __init__(
        self, planner: str = "", *, measured_steps: int = 6, **settings: Any
    ) -> None:
        check_whole("measured_steps", measured_steps, "leave it out")
        function = load("planner", planner)
        with_settings(function, **settings)
        if remedy := getattr(inspect.getmodule(function), "NOT_WHILE_TRAINING", ""):
            raise invalid(
                "planner",
                planner,
                "one that plans once, by layers, links and compressors",
                remedy,
            )
        self.planner = planner
        self.measured_steps = measured_steps
        self.settings = settings

    def __repr__(self) -> str:
        settings = {"measured_steps": self.measured_steps, **self.settings}
        texts = [f"{name}={value!r}" for name, value in settings.items()]
        return f"by_planner({', '.join([repr(self.planner), *texts])})"

    @property
    def compressors(self) -> list[str]:
        """The names of compressors in the planner's settings, defaults included."""
        of = inspect.signature(load("planner", self.planner)).parameters.values()
        values = {parameter.name: parameter.default for parameter in of} | self.settings
        known = {*names("compress")} - {"none"}
        return [
            value
            for value in values.values()
            if isinstance(value, str) and value in known
        ]

    def begin(self, controls: Controls) -> Flight:
        return _Planned(self, controls)


class _Planned(MeasuredFlight):
    """One model under ``by_planner``.

    The planner is tried on links that carry 1 Gbit/s; what it refuses is raised.
    """

    def __init__(self, pilot: by_planner, controls: Controls) -> None:
        super().__init__(
            pilot.planner, pilot.measured_steps, pilot.compressors, controls
        )
        self._pilot = pilot
        self._planned_at = -1
        engine = controls.engine
        params = controls.params
        codec = CodecFit(
            **dict.fromkeys(PRIMITIVES, LineFit(alpha_s=1e-4, per_unit_s=1e-9))
        )
        rate = 1.25e8
        count = engine.ranks_per_host
        cluster = Cluster(
            num_ranks=engine.world,
            rate_bytes_per_s=rate,
            host=Host(num_ranks=count, rate_bytes_per_s=rate) if count > 1 else None,
            codecs=dict.fromkeys(self._compressors, codec),
        )
        profile = stated_profile([(n, as_reals(p)) for n, p in params.items()], "tried")
        made, *_ = self._choose(profile, cluster)
        if made.credit > engine.num_channels:
            raise invalid(
                f"credit of {made.planner}'s plan",
                made.credit,
                f"at most {engine.num_channels}, the channels that attach opens",
                "lower it",
            )

    def _choose(self, profile: Profile, cluster: Cluster) -> Chosen:
        made = plan(self._pilot.planner, profile, cluster, **self._pilot.settings)
        overlaps = made.overlap_forward and self._controls.can_overlap
        carried = made.model_copy(update={"overlap_forward": overlaps})
        return made, iteration_s(carried, profile, cluster), ()

    def stats(self) -> dict[str, Any]:
        planned_at = self._planned_at if self._controls.plan else None
        figures = {"planner": self._pilot.planner, "planned_at": planned_at}
        return {**super().stats(), **figures, "settings": dict(self._pilot.settings)}

    def _take(self, made: Proposal, prediction: str) -> None:
        self._go(made.plan)
        if made.plan is None:
            self._say(f"{prediction}: gradients stay dense", level=logging.WARNING)
            return
        self._planned_at = self._num_steps
        cannot = made.plan.overlap_forward and not self._controls.can_overlap
        self._say(
            prediction
            + ", but nothing is overlapped without optimizer= or under DDP" * cannot
        )

    def _review(self, rows: list[list[float]]) -> None:
        is_first = self._expected_s is None
        self._expected_s = max(row[0] for row in rows)
        if is_first and self._controls.plan is not None:
            self._say(
                f"a step by the plan takes {format_seconds(self._expected_s)}, "
                f"{format_seconds(self.stats()['predicted_s'])} was predicted, "
                f"{format_seconds(self._dense_s)} is that of a dense one"
            )
