"""See methods train on this machine: two minutes, no root, a page in the browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from gradwire.contract.units import parse_rate

from ..demo.demo import Demo
from ..testbed.wide_area import WideArea
from ._options import NumSteps, with_links
from .demo import train, write

app = typer.Typer()


@app.command("try")
@with_links
def try_here(
    wide_area: WideArea,
    rate: Annotated[str, typer.Option(help="Rate of each rank's link.")] = "100mbit",
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
        wide_area=wide_area,
        steps=steps,
        compressors=("cast16", "uniform", "onebit"),
        relayed=True,
    )
    outcome = train("try", settings, title=f"2 ranks at {rate}{wide_area}")
    page = write(outcome, out, title="gradwire try")
    if page is None:
        return
    typer.echo(f"loss over seconds: {page.resolve()}")
    if browser:
        webbrowser.open(page.resolve().as_uri())
