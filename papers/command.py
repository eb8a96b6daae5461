"""The command ``gradwire reproduce``: it prints a paper's figures, writes tables and
pictures.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from gradwire.cli.report import table
from gradwire.cli.report.output import emit, machine, progress
from gradwire.errors import InvalidSetting
from gradwire.version import __version__
from gradwire_bench.report.fractions import Fractions

from . import names, page
from .frame import Item, Reproduction, Row
from .store import Done, chosen, document, run


def reproduce(
    paper: str,
    figures: Sequence[str],
    out: Path,
    *,
    quick: bool,
    fresh: bool,
    as_json: bool,
) -> None:
    """Measures the named figures, or all if none is named, and prints each once it is
    measured.
    """
    found = page(paper)
    names = [one.name for one in chosen(paper, found, figures)]
    stored = out / f"{paper}.json"
    done: list[Done] = []
    if not as_json:
        typer.echo(_head(found))
    with progress(f"reproduce {paper}", total=1) as advance:
        report = Fractions(advance)
        for one in run(
            paper, found, names, stored, quick=quick, fresh=fresh, report=report
        ):
            done.append(one)
            picture = _write(one, out / paper)
            if not as_json:
                _show(one, picture)
    if as_json:
        _print_json(paper, found, done)
    else:
        typer.echo(f"\nall of it: {stored}")


def show_contents(paper: str, figures: Sequence[str], *, as_json: bool) -> None:
    """Prints the paper's tables and figures, each with the figures here that show it
    and how these are made, or why none does. Without a paper's name it prints all
    papers', each with the command that measures it.

    With ``figures`` only the tables and figures that these show are printed.
    """
    if not paper:
        every = [(name, one) for name in names() for one in page(name).contents]
        all_rows = [
            {"name": f"{name}, {one.place}", **_listed(name, one)}
            for name, one in every
        ]
        emit("reproduce --list", all_rows, as_json=as_json, title="all papers")
        return
    found = page(paper)
    wanted = {one.name for one in chosen(paper, found, figures)}
    rows: list[dict[str, object]] = [
        {
            "name": one.place,
            "shows": one.shows,
            "reproduced as": ", ".join(one.figures) or "not reproduced",
            "how": one.how,
            "why not": one.why,
        }
        for one in found.contents
        if not figures or wanted & set(one.figures)
    ]
    emit(f"reproduce {paper} --list", rows, as_json=as_json, title=found.paper)


def _listed(paper: str, one: Item) -> dict[str, object]:
    """The command that measures a table or figure, or the reason why there is none."""
    options = " ".join(f"--figure {figure}" for figure in one.figures)
    command = f"gradwire reproduce {paper} {options}" if options else "not reproduced"
    return {
        "shows": one.shows,
        "command": command,
        "how": one.how,
        "why not": one.why,
    }


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
            "agrees if": claim.agrees_if,
            "agrees": verdict[claim.agrees],
            "why not": claim.why,
        }
        for claim in one.findings.claims
    ]


def _show(one: Done, picture: Path | None) -> None:
    kept = " (measured before)" if one.kept else ""
    title = f"\n{one.figure.name}: {one.figure.title}{kept}"
    hidden = one.figure.unprinted
    emit(
        "reproduce", list(one.findings.rows), as_json=False, title=title, hidden=hidden
    )
    for claim in _claims(one):
        typer.echo(f"\n{claim['name']}: {claim['paper']}")
        within = f" (yes from {claim['agrees if']})" if claim["agrees if"] else ""
        typer.echo(f"  ours: {claim['ours']}; agrees: {claim['agrees']}{within}")
        if claim["why not"]:
            typer.echo(f"  why: {claim['why not']}")
    for note in one.findings.notes:
        typer.echo(f"note: {note}")
    if picture is not None:
        typer.echo(f"picture: {picture}")


def _write(one: Done, folder: Path) -> Path | None:
    """Writes the figure's table (Markdown) and picture; returns the picture's path.

    The path is None if the figure has no picture, or if matplotlib is missing; then the
    table is written all the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = list(one.findings.rows)
    parts = [
        f"# {one.figure.name}: {one.figure.title}",
        table.markdown(table.without(rows, _curves(rows))),
        table.markdown(_claims(one)),
        *one.findings.notes,
    ]
    (folder / f"{one.figure.name}.md").write_text(
        "\n\n".join(parts) + "\n", encoding="utf-8"
    )
    if one.figure.draw is None:
        return None
    try:
        return one.figure.draw(rows, folder / f"{one.figure.name}.png")
    except InvalidSetting as error:
        typer.echo(f"{one.figure.name} has no picture: {error}", err=True)
        return None


def _curves(rows: list[Row]) -> set[str]:
    """Keys whose values are lists of points, which only the picture and the JSON file
    show.
    """
    return {
        key
        for row in rows
        for key, value in row.items()
        if isinstance(value, (list, tuple))
        and any(isinstance(x, (list, tuple)) for x in value)
    }


def _print_json(paper: str, found: Reproduction, done: list[Done]) -> None:
    head = {
        "command": f"reproduce {paper}",
        "version": __version__,
        "machine": machine(),
    }
    print(
        json.dumps({**head, **document(paper, found, done)}, indent=2, allow_nan=False)
    )
