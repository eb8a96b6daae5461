"""Predict one iteration of a model under each planner, for any number of ranks and any
link.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.report.output import AsJson, emit, progress
from gradwire.cli.report.table import Row
from gradwire.contract.registry import load, names
from gradwire.contract.trace.span import Trace
from gradwire.contract.units import format_rate, parse_rate
from gradwire.errors import InvalidSetting, invalid
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.profile import Profile
from gradwire.planning.make_plan import plan as make_plan
from gradwire.planning.simulation.timeline import simulate as run_plan
from gradwire_lab.planning.account import ratio
from gradwire_lab.planning.inputs import RANKS, RATE, load_or_read, read_cluster
from gradwire_lab.planning.tune import search_space

from ..report import curves, timeline
from ._options import Planners, option

app = typer.Typer()


@app.command()
def simulate(
    model: Annotated[
        list[str],
        option("A model of the catalogue, or a profile's file; repeat it."),
    ],
    ranks: Annotated[str | None, option(f"As 8,16,32; else {RANKS}.")] = None,
    rate: Annotated[str | None, option(f"As 1gbit,10gbit; else {RATE}.")] = None,
    delay: Annotated[
        float | None,
        option("Milliseconds that a packet takes one way between hosts."),
    ] = None,
    cluster: Annotated[Path | None, option("A cluster's file.")] = None,
    planner: Planners = None,
    tune: Annotated[bool, option("Show planners with tuned settings too.")] = False,
    picture: Annotated[Path | None, option("Write a timeline (PNG) here.")] = None,
    speedups: Annotated[
        Path | None,
        option("Write speedups over one rank (PNG) here.", "--curves"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict one iteration of a model under each planner, for any number of ranks and
    any link.

    Without --cluster: uncompressed all-reduces on a ring, 65 us a hop. Catalogue times
    are a stated throughput model of a V100, not a measurement. Speedups count the work
    of all ranks. Without --planner, those that cannot plan for a cluster are left out,
    and said to be below the table.
    """
    profiles = [load_or_read(name) for name in model]
    clusters = [
        read_cluster(cluster, num_ranks, link, delay)
        for num_ranks, link in itertools.product(read_ranks(ranks), read_rates(rate))
    ]
    wanted = planner or names("planner")
    for name in wanted:
        load("planner", name)
    cases = [ModelOnCluster(*case) for case in itertools.product(profiles, clusters)]
    if picture is not None and len(cases) > 1:
        accepted = "asked for with one model, one number of ranks and one rate"
        raise invalid(
            "--picture", f"{len(cases)} cases", accepted, "write --curves for several"
        )
    with progress("simulating", total=len(cases)) as advance:
        for case in cases:
            case.run(wanted, tune, may_refuse=not planner)
            advance(note=case.title)
    rows = [row for case in cases for row in case.rows()]
    constant = {key for key in CASE_KEYS if len({row[key] for row in rows}) == 1}
    title = cases[0].title if len(cases) == 1 else f"{len(cases)} cases"
    notes = dict.fromkeys(note for case in cases for note in case.refusals)
    emit(
        "simulate",
        rows,
        as_json=as_json,
        title=title,
        hidden=constant,
        notes=list(notes),
    )
    if picture is not None:
        timeline.draw(cases[0].timelines, picture, title=cases[0].title)
    if speedups is not None:
        draw_speedups(rows, speedups)


def read_ranks(text: str | None) -> list[int | None]:
    """Numbers of ranks such as ``8,16,32``; [None] where none is given.

    >>> read_ranks("8, 16"), read_ranks(None)
    ([8, 16], [None])
    """
    if text is None:
        return [None]
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        accepted = "whole numbers, 1 or more, with commas between them"
        raise invalid("ranks", text, accepted, "write --ranks 8,16,32")
    return [int(word) for word in words]


def read_rates(text: str | None) -> list[str | None]:
    """Link rates such as ``1gbit,10gbit``, each checked; [None] where none is given."""
    if text is None:
        return [None]
    words = [word.strip() for word in text.split(",")]
    for word in words:
        parse_rate(word)
    return [*words]


CASE_KEYS = ("model", "num_ranks", "rate_bytes_per_s")
"""The keys whose values all rows of a case share."""


@dataclass
class ModelOnCluster:
    """One model on one cluster: the trace of each planner, by the planner's name in
    tables.
    """

    profile: Profile
    cluster: Cluster

    def __post_init__(self) -> None:
        self.timelines: dict[str, Trace] = {}
        self.refusals: list[str] = []
        """A sentence for each planner that has no plan for the cluster, and why."""
        self._num_messages: dict[str, int] = {}

    @property
    def title(self) -> str:
        rate = format_rate(self.cluster.rate_bytes_per_s)
        return f"{self.profile.model}, {self.cluster.num_ranks} ranks at {rate}"

    def run(
        self, planners: Sequence[str], tune: bool, *, may_refuse: bool = False
    ) -> None:
        """Plans and simulates; with ``tune`` a second time with settings found by
        search.

        What a planner refuses is raised, or with ``may_refuse`` kept in ``refusals``.
        """
        for name in planners:
            try:
                self._run(name, tune)
            except InvalidSetting as error:
                if not may_refuse:
                    raise
                self.refusals.append(f"{name} has no plan: {error}")

    def _run(self, name: str, tune: bool) -> None:
        searched = tune and bool(search_space(load("planner", name)))
        for shown, tuned in [(name, False)] + [(f"{name} (tuned)", True)] * searched:
            plan = make_plan(name, self.profile, self.cluster, tune=tuned)
            self.timelines[shown] = run_plan(plan, self.profile, self.cluster)
            self._num_messages[shown] = len(plan.messages)

    def rows(self) -> list[Row]:
        profile = self.profile
        num_ranks = self.cluster.num_ranks
        compute_s = profile.forward_s + profile.backward_s
        wfbp = self.timelines.get("wfbp")
        rows: list[Row] = []
        for name, trace in self.timelines.items():
            iteration_s = trace.iteration_s
            row: Row = {
                "name": name,
                "model": profile.model,
                "num_ranks": num_ranks,
                "rate_bytes_per_s": self.cluster.rate_bytes_per_s,
                "simulated_s": iteration_s,
                "messages": self._num_messages[name],
                "compute_s": compute_s,
                "communication_s": trace.busy_s("communication"),
                "fraction_of_ideal": ratio(compute_s, iteration_s),
                "speedup_vs_one_rank": num_ranks * ratio(compute_s, iteration_s),
                "samples_per_second": ratio(
                    num_ranks * profile.batch_size, iteration_s
                ),
            }
            if wfbp is not None:
                row["speedup_vs_wfbp"] = ratio(wfbp.iteration_s, iteration_s)
            rows.append(row)
        return rows


def draw_speedups(rows: Sequence[Row], path: Path) -> None:
    """Draws speedup over ranks where they vary, otherwise over rates; a panel a
    model.
    """
    several = [key for key in CASE_KEYS[1:] if len({row[key] for row in rows}) > 1]
    if not several:
        accepted = "several numbers of ranks or several rates"
        raise invalid(
            "--curves", "one point a planner", accepted, "write --ranks 8,16,32"
        )
    key = several[0]
    others = several[1:]
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        rest = "".join(f", {format_rate(float(str(row[other])))}" for other in others)
        x = float(str(row[key])) * (1.0 if key == "num_ranks" else 8e-9)
        lines = panels.setdefault(f"{row['model']}{rest}", {})
        lines.setdefault(str(row["name"]), []).append(
            (x, float(str(row["speedup_vs_one_rank"])))
        )
        ideal = lines.setdefault("ideal", [])
        if (x, float(str(row["num_ranks"]))) not in ideal:
            ideal.append((x, float(str(row["num_ranks"]))))
    curves.draw_panels(
        panels,
        path,
        title="Simulated speedup over one rank",
        x_label="ranks" if key == "num_ranks" else "rate (Gbit/s)",
        y_label="times the work of one rank",
        doubling=True,
    )
