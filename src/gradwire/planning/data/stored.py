"""Stored: frozen data with a JSON form; errors say which entry is wrong and why.

People edit profiles, clusters and plans, and no rank may start with a wrong one. So
reading is strict: every entry is known, given once, of its type and within its bounds.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...contract.bounds import MOST
from ...contract.files import read_text, write_text
from ...errors import InvalidSetting, shown

SCHEMA = 1
"""Version of the file forms; a file of another one is refused, never guessed at."""

MOST_S = 1e9
"""The most seconds of anything, some thirty years, so that sums stay finite."""

MOST_ELEMENTS = 2**40
"""The most elements of one tensor: 4 TiB of float32."""

MOST_RANKS = 2**16

Whole = Annotated[int, Field(ge=0, le=MOST)]
"""A number that is counted with, and no more than a kernel can be given."""

NonNegative = Annotated[float, Field(ge=0, le=MOST_S, allow_inf_nan=False)]
"""A finite figure that is measured: seconds, seconds a byte, a ratio."""


class Frozen(BaseModel):
    """Data that nobody assigns to, with declared entries only."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Stored(Frozen):
    """Frozen data that is a JSON file of its own."""

    WRITTEN_BY: ClassVar[str]
    """The command that writes such a file, for errors: ``gradwire profile``."""

    schema_version: Literal[1] = 1

    def to_json(self) -> str:
        """The text that ``parse`` reads; equal data gives equal text."""
        return self.model_dump_json(indent=1)

    def save(self, path: Path | str) -> None:
        """Writes the file; ``load`` gives it back exactly.

        A file that is there is replaced at once, so that nobody reads half of it.
        Raises ``InvalidSetting`` where it cannot be written.
        """
        write_text(path, self.to_json() + "\n")

    @classmethod
    def parse(cls, text: str, origin: str | None = None) -> Self:
        """Reads JSON text; ``origin`` is what errors call it.

        Raises ``InvalidSetting`` that names the first wrong entry, what it is, what is
        accepted and what to do: text that is empty or no JSON, an entry that is
        missing, unknown, given twice, of another type or out of bounds, another schema.
        """
        origin = cls.__name__.lower() if origin is None else origin
        try:
            data = json.loads(text, object_pairs_hook=_given_once)
            return cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            what = _first_mistake(error, data)
        except ValueError as error:  # JSONDecodeError is one
            what = f"the whole: {error if text.strip() else 'it is empty'}"
        except RecursionError:
            what = "the whole: it is nested deeper than any such file"
        raise InvalidSetting(
            f"{origin} cannot be read: {what} (schema {SCHEMA} is accepted); "
            f"write it again with {cls.WRITTEN_BY}, or repair this entry"
        )

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Reads a file as ``parse`` reads its text.

        Raises ``InvalidSetting`` if there is none.
        """
        text = read_text(path, f"{cls.WRITTEN_BY} writes such a file")
        return cls.parse(text, str(path))


def check_once(what: str, names: Iterable[str]) -> None:
    """Refuses a name that is listed twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{what} {name!r} is listed twice")


def _given_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict.

    JSON readers keep the last of two equal keys and say nothing.
    """
    values = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{key!r} is given twice in one object")
        values[key] = value
    return values


def _first_mistake(error: ValidationError, data: Any) -> str:
    first = error.errors()[0]
    what = first["msg"].removeprefix("Value error, ")
    given = first["input"]
    is_short = isinstance(given, str | int | float | bool) or given is None
    return f"{_place(first['loc'], data)}: {what}" + (
        f", got {shown(given)}" if is_short else ""
    )


def _place(path: Sequence[int | str], data: Any) -> str:
    """The way to an entry, with the names of the list items it leads through.

    >>> _place(("layers", 1, "forward_s"), {"layers": [{"name": "a"}, {"name": "b"}]})
    "layers.1 ('b').forward_s"
    """
    words = []
    for step in path:
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):
            data = None
        name = (
            data.get("name")
            if isinstance(data, dict) and isinstance(step, int)
            else None
        )
        words.append(f"{step} ({name!r})" if isinstance(name, str) else str(step))
    return ".".join(words) or "the whole"
