"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Replaces the file in one step: a run that is cut short leaves the old one or the
    new one.

    The folder may be one that others write into too, as /tmp is: nothing goes through a
    link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.unlink(missing_ok=True)
    try:
        with fresh.open("xb") as file:
            file.write(content)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
