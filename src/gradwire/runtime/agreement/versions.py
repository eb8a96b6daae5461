"""Versions: a warning where nobody has tried gradwire with this Python or torch."""

import sys
from functools import cache

import torch

from ...errors import log

TRIED = {"Python": ((3, 11), (3, 14)), "torch": ((2, 9), (2, 15))}
"""The oldest and the newest that the tests were run with; see docs/versions.md."""


@cache
def warn_of_versions(
    python: tuple[int, ...] = sys.version_info[:2],
    torch_version: str = str(torch.__version__),
) -> None:
    """Warns, once a process, of versions with which nobody has tried gradwire."""
    versions = {
        "Python": python,
        "torch": tuple(map(int, torch_version.split(".")[:2])),
    }
    for name, (oldest, newest) in TRIED.items():
        if not oldest <= versions[name] <= newest:
            log.warning(
                "%s %d.%d: gradwire was tried with %d.%d to %d.%d; the page Versions "
                "(docs/versions.md) has the table",
                name,
                *versions[name],
                *oldest,
                *newest,
            )
