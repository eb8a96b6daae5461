"""Decide what is sent together, in which pieces and in which order; show and explain a
plan.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.report.output import AsJson, emit, progress
from gradwire.cli.report.table import Row
from gradwire.contract.units import format_rate
from gradwire.errors import InvalidSetting, invalid
from gradwire.planning import catalogue
from gradwire.planning.data.check import check
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan, PlannedMessage
from gradwire.planning.data.profile import Profile
from gradwire.planning.make_plan import plan as make_plan

from ..planning.account import Account
from ..planning.explain import REASONS, alternatives, explain
from ..planning.inputs import (
    RANKS,
    RATE,
    load_or_read,
    option,
    read_cluster,
    read_settings,
    read_speeds,
)
from ..planning.local_rounds import proposals

app = typer.Typer()


@app.command()
def plan(
    model: Annotated[
        str | None, option("A model of the catalogue, or a profile's file.")
    ] = None,
    planner: Annotated[
        str | None, option("Who plans (gradwire list planner), else usbyte.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        option("A setting of the planner, as basic_partition_bytes=4MiB.", "--set"),
    ] = None,
    tune: Annotated[bool, option("Search the settings not given.")] = False,
    show: Annotated[Path | None, option("Read this plan instead.")] = None,
    cluster: Annotated[Path | None, option("A cluster's file.")] = None,
    ranks: Annotated[int | None, option(f"Number of ranks, else {RANKS}.")] = None,
    rate: Annotated[str | None, option(f"Rate of each link, else {RATE}.")] = None,
    delay: Annotated[
        float | None,
        option("Milliseconds that a packet takes one way between hosts."),
    ] = None,
    out: Annotated[Path | None, option("Write the plan (JSON) here.")] = None,
    why: Annotated[
        bool, option("Say why, and what else there is.", "--explain")
    ] = False,
    local: Annotated[
        bool, option("Propose settings of gw.local_steps instead.")
    ] = False,
    speeds: Annotated[
        str | None,
        option("With --local: each rank's speed, as 1,1,0.25; else all 1."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Decide what is sent together, in which pieces and in which order; show and
    explain a plan.

    Without --cluster: uncompressed all-reduces on a ring, 65 us a hop.
    """
    where = read_cluster(cluster, ranks, rate, delay)
    if local or speeds is not None:
        if model is None or not local:
            raise invalid("--local", local, "given with --model", "write both")
        _emit_proposals(load_or_read(model), where, speeds, as_json)
        return
    if show is not None:
        if planner or settings or tune:
            accepted = "given without --planner, --set and --tune"
            raise invalid("--show", str(show), accepted, "leave it out to plan again")
        made = Plan.load(show)
        profile = load_or_read(model) if model else _profile_of(made)
        check(made, profile)
    elif model is None:
        raise InvalidSetting(
            "no model was given; write --model vgg16, or --show plan.json"
        )
    else:
        profile = load_or_read(model)
        values = read_settings(settings or ())
        with progress("planning"):
            made = make_plan(planner or "usbyte", profile, where, tune=tune, **values)
    if out is not None:
        made.save(out)
    title = (
        f"{made.planner} for {made.model}, {where.num_ranks} ranks at "
        + format_rate(where.rate_bytes_per_s)
    )
    if why:
        _emit_reasons(made, profile, where, title, as_json)
    else:
        emit("plan", message_rows(made, profile, where), as_json=as_json, title=title)


def _emit_proposals(
    profile: Profile, cluster: Cluster, speeds: str | None, as_json: bool
) -> None:
    """A row for lock step and one for a quorum, the better one first."""
    step_s = profile.forward_s + profile.backward_s
    seconds = [step_s / speed for speed in read_speeds(speeds, cluster.num_ranks)]
    with progress("playing rounds"):
        found = proposals(profile, cluster, seconds)
    rows: list[Row] = [
        {
            "name": "lock step" if one.quorum is None else f"quorum={one.quorum}",
            "every": one.every,
            "exchange": one.exchange,
            "keeps_up": one.keeps_up,
            **asdict(one.forecast),
        }
        for one in found
    ]
    title = (
        f"local steps of {profile.model}, {cluster.num_ranks} ranks at "
        + format_rate(cluster.rate_bytes_per_s)
    )
    emit("plan", rows, as_json=as_json, title=title)


def message_rows(plan: Plan, profile: Profile, cluster: Cluster) -> list[Row]:
    """A row a message, in issue order, with its times under the model."""
    account = Account.of(plan, profile, cluster)
    timing = account.timing
    rows: list[Row] = []
    for number, message in enumerate(plan.messages):
        behind, hidden_s = account.hidden_behind(number)
        start_s = timing.message_start_s[number]
        end_s = timing.message_end_s[number]
        row: Row = {"name": str(number), "sends": _contents(message)}
        if plan.credit > 1:
            row["lane"] = number % plan.credit
        if any(message.after for message in plan.messages):
            row["after"] = list(message.after)
        if any(message.inline or message.early for message in plan.messages):
            row["encoded_inline"] = len(message.inline)
            row["encoded_early"] = len(message.early)
        rows.append(
            row
            | {
                "size_bytes": account.message_bytes[number],
                "ready_s": account.ready_s[number],
                "start_s": start_s,
                "end_s": end_s,
                "fraction_hidden": hidden_s / (end_s - start_s)
                if end_s > start_s
                else 1.0,
                "behind": behind,
            }
        )
    return rows


def _contents(message: PlannedMessage) -> str:
    first, *others = message.chunks
    more = f" and {len(others)} more" if others else ""
    return f"{first.tensor}[{first.start}:{first.stop}]{more}"


def _emit_reasons(
    plan: Plan, profile: Profile, cluster: Cluster, title: str, as_json: bool
) -> None:
    """The sentences, then the table of planners; as JSON they stand in the plan's own
    row.

    A planner that explains itself has compared plans already, and needs no table.
    """
    explains_itself = plan.planner in REASONS
    with progress("explaining"):
        sentences = explain(plan, profile, cluster)
        rows: list[Row] = [{"name": plan.planner}]
        if not explains_itself:
            rows = alternatives(plan, profile, cluster)
    if as_json:
        own_row = next(row for row in rows if row["name"] == plan.planner)
        own_row["reasons"] = sentences
    else:
        print(f"{title}\n")
        for sentence in sentences:
            print(f"* {sentence}")
        print()
    if as_json or not explains_itself:
        emit(
            "plan", rows, as_json=as_json, title="planners, this one with its settings"
        )


def _profile_of(plan: Plan) -> Profile:
    if plan.model in catalogue.names():
        return catalogue.load(plan.model)
    raise InvalidSetting(
        f"the plan is for {plan.model!r}, which the catalogue lacks; "
        "give its profile with --model profile.json"
    )
