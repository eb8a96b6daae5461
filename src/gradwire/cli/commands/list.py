"""Show what there is of each kind, or the page of one algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from ...errors import UnknownName
from ..report import algorithm
from ..report.output import emit

app = typer.Typer()


@app.command()
def show(
    what: Annotated[
        str | None, typer.Argument(help="A kind, or an algorithm's name; all when left out.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what there is of each kind, or the page of one algorithm."""
    from ...contract.registry import KINDS, names

    every = [(kind, name) for kind in KINDS for name in names(kind)]
    chosen = [one for one in every if what in (None, *one)]
    if not chosen:
        raise UnknownName("kind or algorithm", what, {*KINDS, *(name for _, name in every)})
    rows = [_row(*one) for one in chosen]
    if what is None or what in KINDS:
        emit("list", rows, as_json=json, title="gradwire list")
        return
    pages = [algorithm.page(*one, _measured()) for one in chosen]
    if json:
        rows = [row | {"page": page} for row, page in zip(rows, pages, strict=True)]
        emit("list", rows, as_json=True, title="")
        return
    console = Console()
    for page in pages:
        console.print(Markdown(page)) if console.is_terminal else print(page)


def _row(kind: str, name: str) -> dict[str, object]:
    from ...contract.registry import KINDS, homes, load

    made = load(kind, name)
    row: dict[str, object] = {
        "name": name,
        "kind": KINDS[kind].word,
        "package": homes(kind)[name].distribution,
        "description": algorithm.description(kind, name),
        "settings": algorithm.settings(made),
        "traits": algorithm.traits(made),
    }
    if kind == "compress":
        row["exchange"] = algorithm.exchange(made())
    return row


def _measured() -> str | None:
    """The page of measurements, which is in a checkout and in no wheel."""
    source = Path(__file__).resolve().parents[3]
    path = source.parent / "docs" / "measured.md"
    is_there = source.name == "src" and path.is_file()
    return path.read_text(encoding="utf-8") if is_there else None
