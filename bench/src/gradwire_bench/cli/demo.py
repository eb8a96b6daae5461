"""Train a real model on shaped links by several methods, and compare."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.report.output import AsJson, emit, machine, progress
from gradwire.contract.units import parse_rate
from gradwire.errors import NotInstalled

from ..demo.demo import Demo, DemoResult, run, write_report
from ..demo.demo_rank import COMPRESSORS
from ..report.fractions import Fractions
from ..testbed.wide_area import WideArea
from ._options import (
    LinkRate,
    NumSteps,
    SingleRankHosts,
    TaskName,
    option,
    with_links,
)

app = typer.Typer()


@app.command()
@with_links
def demo(
    wide_area: WideArea,
    hosts: SingleRankHosts = 4,
    rate: LinkRate = "200mbit",
    steps: NumSteps = 40,
    task: TaskName = "text",
    compressor: Annotated[
        list[str] | None,
        option("A compressor of gradwire list; may be repeated."),
    ] = None,
    out: Annotated[Path, option("Folder for pictures, traces and the report.")] = Path(
        "demo-report"
    ),
    as_json: AsJson = False,
) -> None:
    """Train a real model on shaped links by several methods, and compare.

    The same model, data and steps through plain DDP, DDP with the fp16 hook, and
    gradwire with dense, cast16, 4-bit, onebit and top-k 1 % exchanges, or with the
    compressors that are named.
    """
    settings = Demo(
        hosts=hosts,
        rate_bytes_per_s=parse_rate(rate),
        wide_area=wide_area,
        steps=steps,
        task=task,
        compressors=tuple(compressor or COMPRESSORS),
    )
    title = f"{hosts} hosts at {rate}{wide_area}"
    outcome = train("demo", settings, title=title, as_json=as_json)
    page = write(outcome, out, title="gradwire demo")
    if not as_json:
        for note in outcome.notes:
            typer.echo(note)
        if page is not None:
            typer.echo(f"report: {page}")


def train(
    command: str, settings: Demo, *, title: str, as_json: bool = False
) -> DemoResult:
    """Trains by all methods, and prints the table.

    It says first, on stderr, how long it takes until something is to be seen.
    """
    starts = f"{settings.hosts} ranks start; the first step comes in about"
    typer.echo(f"{starts} {settings.start_s:.0f} s", err=True)
    with progress(command, total=1) as advance:
        outcome = run(settings, Fractions(advance))
    emit(command, outcome.rows, as_json=as_json, title=title, hidden=outcome.hidden)
    return outcome


def write(outcome: DemoResult, folder: Path, *, title: str) -> Path | None:
    """Writes the report; figures that took minutes are not lost for lack of a package
    for it.
    """
    command = shlex.join(["gradwire", *sys.argv[1:]])
    try:
        return write_report(
            outcome, folder, title=title, command=command, machine=machine()
        )
    except NotInstalled as error:
        typer.echo(f"there is no report, only traces in {folder}: {error}", err=True)
        return None
