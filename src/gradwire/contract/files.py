"""Files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from secrets import token_hex


def write_anew(target: Path, text: str) -> None:
    """Puts a file of this text in the place of ``target``, whole or not at all.

    The text goes to a file of a name that nobody can guess, which must not be there yet, and which
    then takes the target's name. So no link that somebody has laid is written through.
    """
    draft = target.with_name(f"{target.name}.{token_hex(8)}.new")
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
