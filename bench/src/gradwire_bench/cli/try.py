"""See methods train on this machine: two minutes, no root, a page in the browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.report.links import Delay, Down, Jitter, Slow, Up
from gradwire.cli.report.output import Fractions, emit, progress
from gradwire.contract.units import parse_rate

from ..demo.demo import Demo, run
from ..testbed.wide_area import read_wide_area
from ._options import NumSteps
from .demo import announce, write

app = typer.Typer()


@app.command("try")
def try_here(
    rate: Annotated[str, typer.Option(help="Rate of each rank's link.")] = "100mbit",
    delay: Delay = 0.0,
    jitter: Jitter = 0.0,
    up: Up = None,
    down: Down = None,
    slow: Slow = None,
    steps: NumSteps = 24,
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path(
        "gradwire-try"
    ),
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Train a small model by five methods on this machine, and show the loss over
    seconds.

    Two ranks train behind slow links. A relay in user space limits their rates, so this
    needs neither root nor network namespaces. It takes about two minutes.
    """
    settings = Demo(
        hosts=2,
        rate_bytes_per_s=parse_rate(rate),
        wide_area=read_wide_area(delay, jitter, up, down, slow),
        steps=steps,
        compressors=("cast16", "uniform", "onebit"),
        relayed=True,
    )
    announce(settings)
    with progress("try", total=1) as advance:
        outcome = run(settings, Fractions(advance))
    title = f"2 ranks at {rate}{settings.wide_area}"
    emit("try", outcome.rows, as_json=False, title=title, hidden=outcome.hidden)
    page = write(outcome, out, title="gradwire try")
    if page is None:
        return
    typer.echo(f"loss over seconds: {page.resolve()}")
    if browser:
        webbrowser.open(page.resolve().as_uri())
