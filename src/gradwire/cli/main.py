"""The entry point: finds the verbs in this folder and turns errors into exit codes.

0: done; 1: a check found something wrong; 2: a user's mistake, with what was given,
what is accepted and what to do; else the code of the error's cause (`errors.ExitCode`).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..contract.registry import COMMANDS, Home, found_of
from ..errors import GradwireError
from ..version import __version__


def verbs() -> dict[str, Home]:
    """The installed commands and where they are defined, ascending.

    >>> sorted(verbs()) == list(verbs()) and "doctor" in verbs()
    True
    """
    return {name.replace("_", "-"): home for name, home in found_of(COMMANDS).items()}


def summary(home: Home) -> str:
    """First line of a command's docstring, read without importing the file."""
    try:
        spec = importlib.util.find_spec(home.module)
    except ImportError:  # a package of somebody's that is not whole
        spec = None
    if spec is None or spec.origin is None:
        return ""
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    return (text or "").partition("\n")[0]


class Verbs(TyperGroup):
    """Lists commands by their docstrings and imports one to run it: help is fast."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._homes = verbs()
        for name, home in self._homes.items():
            self.add_command(TyperCommand(name, help=summary(home)), name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command in place of the line that stands for it in the help."""
        if args[0] not in self._homes:
            COMMANDS.refuse_elsewhere(args[0])
        name, command, rest = super().resolve_command(ctx, args)
        if name in self._homes:
            command = typer.main.get_command(app_of(self._homes[name]))
        return name, command, rest


def app_of(home: Home) -> typer.Typer:
    """The Typer app of a command: what an entry point names, or its file's ``app``."""
    home.refuse_clash()
    module = importlib.import_module(home.module)
    attribute = getattr(module, home.attribute, None)
    made: typer.Typer = attribute if isinstance(attribute, typer.Typer) else module.app
    return made


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
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and end.",
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
