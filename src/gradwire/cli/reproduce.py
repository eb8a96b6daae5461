"""Measure a paper's tables and figures, and print them beside the paper's own statements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .._version import __version__
from ..errors import InvalidSetting
from ..load import load, names
from ..report import table
from ..reproduce._frame import Reproduction, Row
from ..reproduce._store import Done, chosen, document, run
from ._output import Fractions, emit, machine, progress

app = typer.Typer()


@app.command()
def reproduce(
    paper: Annotated[str, typer.Argument(help=f"Whose results: {', '.join(names('reproduce'))}.")],
    figure: Annotated[
        list[str] | None, typer.Option(help="Only this figure or table; may be given again.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer trials and iterations.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure what is there again.")] = False,
    out: Annotated[
        Path, typer.Option(help="Folder for the figures: one JSON file, tables and pictures.")
    ] = Path("reproduction"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a paper's tables and figures, and print them beside the paper's own statements.

    A run that was cut short goes on where it ended: what the folder holds is not measured again.
    """
    found: Reproduction = load("reproduce", paper)
    names = [one.name for one in chosen(paper, found, figure or ())]
    stored = out / f"{paper}.json"
    done: list[Done] = []
    if not as_json:
        typer.echo(_head(found))
    with progress(f"reproduce {paper}", total=1) as advance:
        report = Fractions(advance)
        figures = run(paper, found, names, stored, quick=quick, fresh=fresh, report=report)
        for one in figures:
            done.append(one)
            picture = _write(one, out / paper)
            if not as_json:
                _show(one, picture)
    if as_json:
        _print_json(paper, found, done)
    else:
        typer.echo(f"\nall of it: {stored}")


def _head(found: Reproduction) -> str:
    lines = [found.paper, "", "assumptions"]
    return "\n".join([*lines, *(f"  - {text}" for text in found.assumptions)])


def _claims(one: Done) -> list[dict[str, object]]:
    verdict = {True: "yes", False: "no", None: "not said"}
    return [
        {
            "name": claim.place,
            "paper": claim.says,
            "ours": claim.ours,
            "agrees": verdict[claim.agrees],
            "why not": claim.why,
        }
        for claim in one.findings.claims
    ]


def _show(one: Done, picture: Path | None) -> None:
    kept = " (measured before)" if one.kept else ""
    title = f"\n{one.figure.name}: {one.figure.title}{kept}"
    hidden = one.figure.unprinted
    emit("reproduce", list(one.findings.rows), as_json=False, title=title, hidden=hidden)
    for claim in _claims(one):
        typer.echo(f"\n{claim['name']}: {claim['paper']}")
        typer.echo(f"  ours: {claim['ours']}; agrees: {claim['agrees']}")
        if claim["why not"]:
            typer.echo(f"  why: {claim['why not']}")
    for note in one.findings.notes:
        typer.echo(f"note: {note}")
    if picture is not None:
        typer.echo(f"picture: {picture}")


def _write(one: Done, folder: Path) -> Path | None:
    """Writes the figure's table (Markdown) and picture; returns the picture's path.

    None if it has no picture, or if matplotlib is missing, which is not worth losing figures for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = list(one.findings.rows)
    parts = [
        f"# {one.figure.name}: {one.figure.title}",
        table.markdown(table.without(rows, _curves(rows))),
        table.markdown(_claims(one)),
        *one.findings.notes,
    ]
    (folder / f"{one.figure.name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    if one.figure.draw is None:
        return None
    try:
        return one.figure.draw(rows, folder / f"{one.figure.name}.png")
    except InvalidSetting as error:
        typer.echo(f"{one.figure.name} has no picture: {error}", err=True)
        return None


def _curves(rows: list[Row]) -> set[str]:
    """Keys of lists of points: those are for the picture and the JSON file."""
    return {
        key
        for row in rows
        for key, value in row.items()
        if isinstance(value, (list, tuple)) and any(isinstance(x, (list, tuple)) for x in value)
    }


def _print_json(paper: str, found: Reproduction, done: list[Done]) -> None:
    head = {"command": f"reproduce {paper}", "version": __version__, "machine": machine()}
    print(json.dumps({**head, **document(paper, found, done)}, indent=2, allow_nan=False))
