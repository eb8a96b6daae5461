"""The output of a verb: one JSON object, a table on a terminal, else columns."""

import json
import math
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from ...kernels.prebuilt import cpu_lines
from ...version import __version__
from . import table
from .table import Row

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
"""The option of a command whose result is wanted as JSON."""


def emit(
    command: str,
    rows: list[Row],
    *,
    as_json: bool,
    title: str,
    hidden: Collection[str] = (),
    notes: Collection[str] = (),
) -> None:
    """Prints a verb's result on stdout; keys in ``hidden`` only as JSON.

    ``rows`` each have a ``name`` and plain values with their unit in the key. As JSON
    it is one object ``{"command", "version", "machine", "rows"}``; figures that are not
    finite become null. ``notes`` are printed below the rows, and stand under that key
    where there are any.
    """
    if as_json:
        result = {
            "command": command,
            "version": __version__,
            "machine": machine(),
            "rows": [
                {
                    key: None
                    if isinstance(value, float) and not math.isfinite(value)
                    else value
                    for key, value in row.items()
                }
                for row in rows
            ],
        }
        if notes:
            result["notes"] = list(notes)
        print(json.dumps(result, indent=2, allow_nan=False))
        return
    rows = table.without(rows, hidden)
    console = Console()
    if console.is_terminal:
        table.print_table(rows, console, title=title)
    else:
        print(table.plain(rows, title=title))
    for note in notes:
        print(f"\n{note}")


def machine() -> Row:
    """The things that figures depend on: processor, memory, system and versions."""
    cpu = cpu_lines()
    name = cpu.get("model name") or cpu.get("Model", "")
    return {
        "cpu": name.partition(": ")[2] or platform.processor() or platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": installed_version("torch"),
        "gradwire": __version__,
    }


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, found without importing it.

    None if absent.
    """
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def progress(title: str, total: float | None = None) -> Iterator[Callable[..., None]]:
    """Shows that work of more than two seconds goes on.

    On stderr, and only on a terminal.

    Yields ``advance(amount=1, note="")``. Without ``total`` the bar only says that it
    lives.

        with progress("measuring", total=3) as advance:
            for size in sizes:
                measure(size)
                advance(note=f"{size} bytes")
    """
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda *_, **__: None
        return
    fields = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
    )
    with Progress(*fields, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total, note="")

        def advance(amount: float = 1, note: str = "") -> None:
            bar.update(task, advance=amount, note=note)

        yield advance
