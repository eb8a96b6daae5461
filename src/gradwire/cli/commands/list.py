"""Show what there is of each kind, or the page of one algorithm."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from enum import Enum
from typing import Annotated, Any

import typer

from ...contract import Compressor
from ...contract.registry import KINDS, extension, homes, load, names
from ...errors import NotInstalled, UnknownName
from ...exchange.pair import suited
from ..report.output import AsJson, emit
from ..report.table import Row

app = typer.Typer()

_ARGUMENTS = re.compile(r"^Args:\n((?: {4}.*\n|\n)+)", re.M)
_ARGUMENT = re.compile(r"^ {4}(\w+): (\S.*\n(?: {5,}.*\n|\n)*)", re.M)
"""An argument of a docstring, and the words on it."""


@app.command()
def show(
    what: Annotated[
        str | None,
        typer.Argument(help="A kind, or an algorithm's name; all when left out."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show what there is of each kind, or the page of one algorithm."""
    every = [(kind, name) for kind in KINDS for name in names(kind)]
    chosen = [pair for pair in every if what in (None, *pair)]
    if not chosen:
        raise UnknownName(
            "kind or algorithm", what, {*KINDS, *(name for _, name in every)}
        )
    rows = [_row(*pair) for pair in chosen]
    notes = []
    if what is not None and what not in KINDS:
        for row, pair in zip(rows, chosen, strict=True):
            row["arguments"] = explained(load(*pair))
        try:
            pages = extension("pages", "an algorithm's page (gradwire list NAME)")
            pages.show(chosen, rows, as_json=json)
            return
        except NotInstalled as error:
            for pair in chosen:
                notes += [
                    f"{arg}: {words}" for arg, words in explained(load(*pair)).items()
                ]
            notes.append(f"Its page: {error}")
    hidden = ("arguments",)
    emit("list", rows, as_json=json, title="gradwire list", hidden=hidden, notes=notes)


def _row(kind: str, name: str) -> Row:
    made = load(kind, name)
    row: Row = {
        "name": name,
        "kind": KINDS[kind].word,
        "package": homes(kind)[name].distribution,
        "description": description(kind, name),
        "settings": settings(made),
        "traits": traits(made),
    }
    if kind == "compress":
        row["exchange"] = exchange(made())
    return row


def description(kind: str, name: str) -> str:
    """The first line of an algorithm's file, without its own name and the period."""
    line = docstring(kind, name).partition("\n")[0].rstrip(".")
    head, colon, rest = line.partition(": ")
    return rest if colon and len(head) <= 2 * len(name) + 8 else line


def docstring(kind: str, name: str) -> str:
    """The header of an algorithm's file."""
    return inspect.getdoc(importlib.import_module(homes(kind)[name].module)) or ""


def settings(algorithm: Any) -> list[str]:
    """The keyword settings: fields of a compressor, arguments of a planner."""
    made = {
        field.name: field.default_factory()
        for field in (
            dataclasses.fields(algorithm) if dataclasses.is_dataclass(algorithm) else ()
        )
        if field.default_factory is not dataclasses.MISSING
    }
    return [
        p.name
        if p.default is p.empty
        else f"{p.name}={made.get(p.name, p.default)}".replace("=torch.", "=")
        for p in inspect.signature(algorithm).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    ]


def explained(algorithm: Any) -> dict[str, str]:
    """The words of docstrings on each of an algorithm's ``settings``.

    >>> from gradwire.compress.topk import topk
    >>> print(explained(topk)["density=0.01"].partition(";")[0])
    The kept fraction k/n, in (0, 1]
    """
    words = {}
    for documented in reversed(getattr(algorithm, "__mro__", (algorithm,))):
        docstring = inspect.cleandoc(documented.__doc__ or "")
        for section in _ARGUMENTS.findall(f"{docstring}\n"):
            for name, text in _ARGUMENT.findall(section):
                words[name] = " ".join(text.split())
    return {
        setting: words.get(setting.partition("=")[0], "")
        for setting in settings(algorithm)
    }


def traits(algorithm: Any) -> list[str]:
    """A compressor's promises, or a collective's needs of one, as words."""
    promised = getattr(algorithm, "traits", None)
    needed = getattr(algorithm, "needs", None)
    if promised is not None:
        return _words(promised)
    return [f"needs {word}" for word in _words(needed)] if needed is not None else []


def exchange(algorithm: Any) -> str:
    """The exchange that an algorithm gets when it is given alone."""
    is_codec = isinstance(algorithm, Compressor)
    name = type(suited(algorithm)).__name__ if is_codec else "its own"
    return f"{name} + error feedback" if algorithm.traits.error_feedback else name


def _words(declared: Any) -> list[str]:
    words = []
    for field in dataclasses.fields(declared):
        value = getattr(declared, field.name)
        if isinstance(value, Enum):
            words.append(str(value.value))
        elif value is True:
            words.append(field.name.replace("_", " "))
        elif value and field.name == "layouts":
            words.append(" or ".join(layout.value for layout in value))
    return words
