"""Measure a paper's tables and figures, and print them beside the paper's own statements."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire.errors import InvalidSetting

# ---- Finds the packages of a checkout of the sources that are in no wheel ------------------------

ROOT = Path(__file__).resolve().parents[4]
"""The checkout, where gradwire-bench is run from its sources."""


def beside(folder: str, module: str) -> Any:
    """The module ``module`` of ``folder``, a package of the checkout that this is run from.

    Raises ``InvalidSetting`` where gradwire-bench was not installed from a checkout.
    """
    if not (ROOT / folder / "__init__.py").is_file():
        raise InvalidSetting(
            f"{folder}/ is part of gradwire's source repository and of no package; get the "
            "sources, and in their folder run: make setup"
        )
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"{folder}.{module}")


app = typer.Typer()


@app.command()
def reproduce(
    paper: Annotated[
        str, typer.Argument(help="Whose results: deft, hipress, ssfusion, usbyte or zen.")
    ],
    figure: Annotated[
        list[str] | None, typer.Option(help="Only this figure or table; may be given again.")
    ] = None,
    contents: Annotated[
        bool, typer.Option("--list", help="Only list the paper's tables and figures.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer trials and iterations.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure what is there again.")] = False,
    out: Annotated[
        Path, typer.Option(help="Folder for the figures: one JSON file, tables and pictures.")
    ] = Path("reproduction"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a paper's tables and figures, and print them beside the paper's own statements.

    The papers are in a checkout of gradwire's sources, beside src/. A run that was cut short goes
    on where it ended: what the folder holds is not measured again. --list measures nothing: it
    shows which tables and figures are reproduced, by which figure, and why others are not.
    """
    command = beside("papers", "command")
    if contents:
        command.show_contents(paper, figure or (), as_json=as_json)
        return
    command.reproduce(paper, figure or (), out, quick=quick, fresh=fresh, as_json=as_json)
