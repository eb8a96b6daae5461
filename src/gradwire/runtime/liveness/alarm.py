"""Alarms: the notes by which ranks announce that a step has failed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from ...errors import ExitCode

MOST_CHARACTERS = 2000
"""The most characters of an alarm's text that travel.

An error may quote a tensor, or a log.
"""


class Alarm(NamedTuple):
    """A failure: the ranks (of the group) that it began at, the step, a sentence about
    it, and the exit code of its cause.

    ``beyond`` are ranks outside of the group, by their numbers in the job. Their loss
    ends a step here too, as it ended one of another model.
    """

    ranks: tuple[int, ...]
    step: int
    text: str
    code: int = ExitCode.RANK_LOST
    beyond: tuple[int, ...] = ()

    def encoded(self) -> str:
        """The alarm as ASCII, which the store takes, whatever characters its text has.

        >>> Alarm((2,), 7, "rank 2 of 4 raised ValueError: no ♥").encoded()
        '[[2], 7, "rank 2 of 4 raised ValueError: no \\\\u2665", 75, []]'
        """
        return json.dumps(
            [self.ranks, self.step, _plain(self.text), self.code, self.beyond]
        )

    @classmethod
    def decoded(cls, line: bytes, step: int) -> Alarm:
        """The alarm in these bytes.

        If they hold none, an alarm in ``step`` that names no rank.
        """
        try:
            match json.loads(line):
                case [list(ranks), at, str(text), code, list(beyond)] if all(
                    type(n) is int for n in (at, *ranks, *beyond)
                ) and code in {*ExitCode}:
                    return cls(tuple(ranks), at, _plain(text), code, tuple(beyond))
        except (ValueError, RecursionError):
            pass
        return cls(
            (), step, f"a rank left an alarm that cannot be read, {_plain(ascii(line))}"
        )


def listed(ranks: Iterable[int]) -> str:
    """Ranks as errors name them.

    >>> listed((1, 3))
    '1, 3'
    """
    return ", ".join(map(str, ranks))


def said(error: BaseException) -> str:
    """The error's type and text, even if it has none.

    >>> said(ValueError("no such layer"))
    'ValueError: no such layer'
    """
    try:
        text = str(error).strip()
    except Exception:  # the user's own class may do anything there
        text = "its text cannot be had"
    return f"{type(error).__name__}: {text}"


def _plain(text: str) -> str:
    """The text in characters that every file and terminal takes, cut if too long."""
    text = text[: MOST_CHARACTERS + 1].encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 3]}..."
