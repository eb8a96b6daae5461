"""Measure a paper's tables and figures, and print them beside the paper's own
statements.
"""

from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.report.output import AsJson

from ._checkout import beside
from ._options import option

app = typer.Typer()


@app.command()
def reproduce(
    paper: Annotated[
        str,
        typer.Argument(help="Whose results: deft, hipress, ssfusion, usbyte or zen."),
    ] = "",
    figure: Annotated[
        list[str] | None,
        option("Only this figure or table; may be given again."),
    ] = None,
    contents: Annotated[
        bool, option("Only list the paper's tables and figures.", "--list")
    ] = False,
    quick: Annotated[bool, option("Fewer trials and iterations.", "--quick")] = False,
    fresh: Annotated[bool, option("Measure what is there again.", "--fresh")] = False,
    out: Annotated[
        Path,
        option("Folder for the figures: one JSON file, tables and pictures."),
    ] = Path("reproduction"),
    as_json: AsJson = False,
) -> None:
    """Measure a paper's tables and figures, and print them beside the paper's own
    statements.

    The papers are in a checkout of the sources and in no package. A run that was cut
    short goes on where it ended: what the folder holds is not measured again. --list
    measures nothing: it shows which tables and figures are reproduced, by which figure,
    measured, simulated or by construction, and why others are not. Without a paper
    --list shows all five papers.
    """
    command = beside("papers", "command")
    if contents:
        command.show_contents(paper, figure or (), as_json=as_json)
        return
    command.reproduce(
        paper, figure or (), out, quick=quick, fresh=fresh, as_json=as_json
    )
