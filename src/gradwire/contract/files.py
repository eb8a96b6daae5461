"""Text files: written whole or not at all; errors name the file and the remedy."""

from pathlib import Path
from secrets import token_hex

from ..errors import InvalidSetting


def read_text(path: Path | str, remedy: str) -> str:
    """The text of a file in UTF-8; raises ``InvalidSetting`` where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidSetting(
            f"{path} cannot be read: {_reason(error)}; {remedy}"
        ) from None


def write_text(path: Path | str, text: str) -> None:
    """Writes a file.

    One that is there is replaced at once, so that nobody reads half of it.

    Raises ``InvalidSetting`` where it cannot be written.
    """
    try:
        target = Path(path).resolve()
        # a pipe or a device stays what it is
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
        else:
            write_anew(target, text)
    except (OSError, ValueError) as error:
        remedy = "name a file in a folder that there is"
        raise InvalidSetting(
            f"{path} cannot be written: {_reason(error)}; {remedy}"
        ) from None


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not text"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def write_anew(target: Path, text: str) -> None:
    """Puts a file of this text in the place of ``target``, whole or not at all.

    The text goes to a file of a name that nobody can guess, which must not be there
    yet, and which then takes the target's name. So no link that somebody has laid is
    written through.
    """
    temporary = target.with_name(f"{target.name}.{token_hex(8)}.new")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
