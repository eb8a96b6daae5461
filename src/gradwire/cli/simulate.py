"""Predict one iteration of a model under each planner, for any number of ranks and any link."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import catalogue
from ..cost.cluster import Cluster
from ..cost.profile import Profile
from ..load import load, names
from ..planner._check import check
from ..report import timeline
from ..sim.timeline import simulate as run_plan
from ..trace.chrome import save_chrome
from ..trace.span import Trace
from ..units import parse_rate
from ._output import emit

app = typer.Typer()


@app.command()
def simulate(
    model: Annotated[str, typer.Option(help="A model of the catalogue, or a profile's file.")],
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 8,
    rate: Annotated[str, typer.Option(help="Rate of each rank's link.")] = "10gbit",
    planner: Annotated[list[str] | None, typer.Option(help="Only these planners.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write a timeline (PNG) here.")] = None,
    traces: Annotated[Path | None, typer.Option(help="Folder for Chrome traces.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Predict one iteration of a model under each planner, for any number of ranks and any link.

    Uncompressed all-reduces on a ring, 65 us a hop. Catalogue times are a stated throughput model
    of a V100, not a measurement.
    """
    profile = Profile.load(model) if Path(model).exists() else catalogue.load(model)
    cluster = Cluster(num_ranks=ranks, rate_bytes_per_s=parse_rate(rate))
    timelines: dict[str, Trace] = {}
    rows: list[dict[str, object]] = []
    for name in planner or names("planner"):
        plan = load("planner", name)(profile, cluster)
        check(plan, profile)
        timelines[name] = run_plan(plan, profile, cluster)
        rows.append(_row(name, len(plan.messages), timelines[name], profile))
    wfbp = timelines.get("wfbp")
    for row in rows:
        if wfbp is not None:
            row["speedup_vs_wfbp"] = wfbp.iteration_s / timelines[str(row["name"])].iteration_s
    emit("simulate", rows, as_json=as_json, title=f"{profile.model}, {ranks} ranks at {rate}")
    if picture is not None:
        timeline.draw(timelines, picture, title=f"{profile.model}, {ranks} ranks at {rate}")
    if traces is not None:
        traces.mkdir(parents=True, exist_ok=True)
        for name, trace in timelines.items():
            save_chrome(trace, traces / f"{name}.trace.json")


def _row(name: str, num_messages: int, trace: Trace, profile: Profile) -> dict[str, object]:
    compute_s = profile.forward_s + profile.backward_s
    return {
        "name": name,
        "simulated_s": trace.iteration_s,
        "messages": num_messages,
        "compute_s": compute_s,
        "communication_s": trace.busy_s("communication"),
        "fraction_of_ideal": compute_s / trace.iteration_s,
    }
