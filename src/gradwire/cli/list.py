"""Show what there is of each kind: compressors, collectives, planners, sparse formats."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from enum import Enum
from typing import Annotated, Any

import typer

from ..errors import invalid
from ..report.output import emit

app = typer.Typer()


@app.command()
def show(
    kind: Annotated[
        str | None, typer.Argument(help="One of the kinds that are listed; all when left out.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what there is of each kind: compressors, collectives, planners, sparse formats."""
    from ..load import KINDS

    if kind is not None and kind not in KINDS:
        raise invalid("kind", kind, f"one of {', '.join(KINDS)}", "leave it out to see all")
    rows = [row for one in KINDS if kind in (None, one) for row in _rows(one)]
    emit("list", rows, as_json=json, title="gradwire list")


def _rows(kind: str) -> list[dict[str, object]]:
    from ..load import KINDS, load, names

    rows: list[dict[str, object]] = []
    for name in names(kind):
        algorithm = load(kind, name)
        docstring = inspect.getdoc(importlib.import_module(f"gradwire.{kind}.{name}")) or ""
        row: dict[str, object] = {
            "name": name,
            "kind": KINDS[kind],
            "description": _first_line(docstring, name),
            "settings": _settings(algorithm),
            "traits": _traits(algorithm),
        }
        if kind == "compress":
            row["exchange"] = _exchange(algorithm())
        rows.append(row)
    return rows


def _exchange(algorithm: Any) -> str:
    """The exchange that an algorithm gets when it is given alone."""
    from ..contract import Compressor
    from ..pairing import suited

    is_codec = isinstance(algorithm, Compressor)
    name = type(suited(algorithm)).__name__ if is_codec else "its own"
    return f"{name} + error feedback" if algorithm.traits.error_feedback else name


def _first_line(docstring: str, name: str) -> str:
    """The docstring's first line without the algorithm's own name before it and the period."""
    line = docstring.partition("\n")[0].rstrip(".")
    head, colon, rest = line.partition(": ")
    return rest if colon and len(head) <= 2 * len(name) + 8 else line


def _settings(algorithm: Any) -> list[str]:
    """The settings that are given by keyword: fields of a compressor, arguments of a planner."""
    made = {
        field.name: field.default_factory()
        for field in (dataclasses.fields(algorithm) if dataclasses.is_dataclass(algorithm) else ())
        if field.default_factory is not dataclasses.MISSING
    }
    return [
        p.name if p.default is p.empty else f"{p.name}={_shown(made.get(p.name, p.default))}"
        for p in inspect.signature(algorithm).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    ]


def _shown(default: object) -> str:
    return str(default).removeprefix("torch.")


def _traits(algorithm: Any) -> list[str]:
    """A compressor's promises, or a collective's needs of one, as words."""
    promised, needed = getattr(algorithm, "traits", None), getattr(algorithm, "needs", None)
    if promised is not None:
        return _words(promised)
    return [f"needs {word}" for word in _words(needed)] if needed is not None else []


def _words(declared: Any) -> list[str]:
    words: list[str] = []
    for field in dataclasses.fields(declared):
        value = getattr(declared, field.name)
        if isinstance(value, Enum):
            words.append(str(value.value))
        elif value is True:
            words.append(field.name.replace("_", " "))
    return words
