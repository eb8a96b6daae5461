"""The entry point: finds the verbs in this folder and turns errors into exit codes.

0: done; 1: a check found something wrong; 2: a user's mistake, with what was given, what is
accepted and what to do; else the code of the error's cause (`errors.ExitCode`).
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import GradwireError
from ..version import __version__

FOLDER = Path(__file__).parent


def verbs() -> dict[str, Path]:
    """Verbs and the files that define them, ascending.

    >>> sorted(verbs()) == list(verbs()) and "doctor" in verbs()
    True
    """
    files = sorted(FOLDER.glob("[!_]*.py"))
    return {path.stem.replace("_", "-"): path for path in files if path.stem != "main"}


def summary(path: Path) -> str:
    """First line of a file's docstring, read without importing the file."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return (text or "").partition("\n")[0]


class Verbs(TyperGroup):
    """Lists verbs by their docstrings and imports a verb only to run it: help stays fast."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._files = verbs()
        for name, path in self._files.items():
            self.add_command(TyperCommand(name, help=summary(path)), name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command in place of the line that stands for it in the help."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in self._files:
            module = importlib.import_module(f"{__package__}.{self._files[name].stem}")
            command = typer.main.get_command(module.app)
        return name, command, rest


app = typer.Typer(cls=Verbs, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradwire {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Data-parallel PyTorch training that stays fast on slow networks."""


def main() -> None:
    """Runs the command line; the console script ``gradwire`` points here."""
    try:
        app(prog_name="gradwire")
    except GradwireError as error:
        print(f"gradwire: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
