"""The folders of data that gradwire does not ship: the user's own, and those of
packages.

Source: XDG Base Directory Specification 0.8, for the variables and what stands for
unset ones.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path


def places(name: str) -> tuple[Path, ...]:
    """The folders in which data of this name are looked for, the user's own first.

    They are ``$XDG_DATA_HOME/gradwire/NAME``, with ``~/.local/share`` where the
    variable is unset, and ``datasets/NAME`` below each of ``$XDG_DATA_DIRS``.
    """
    home = os.environ.get("XDG_DATA_HOME", "")
    paths = [Path(home, "gradwire", name)] if home else []
    if not home:
        with contextlib.suppress(RuntimeError):  # a user without a home
            paths.append(Path.home() / ".local" / "share" / "gradwire" / name)
    shared = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    return (
        *paths,
        *(Path(folder, "datasets", name) for folder in shared.split(":") if folder),
    )


def folder_of(
    name: str, files: Sequence[str], given: Path | None = None
) -> Path | None:
    """The first of ``places`` that has all of these files, or ``given`` if that has
    them.
    """
    for folder in places(name) if given is None else (given,):
        if all((folder / file).exists() for file in files):
            return folder
    return None


def looked_in(name: str, given: Path | None) -> str:
    """The folders that ``folder_of`` looks in, in words."""
    return " or ".join(map(str, places(name) if given is None else (given,)))
