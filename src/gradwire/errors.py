"""Every error gradwire raises on purpose.

GradwireError
├── InvalidSetting (ValueError)        a user's mistake; the message ends in what to do
│   ├── NotInstalled                   an optional package is needed, and is not there
│   ├── UnknownName                    no file of that folder bears this name
│   ├── IncompatiblePair               a compressor and a collective that exclude each other
│   └── RanksDiffer                    ranks attached different models or settings
├── LawBroken (AssertionError)          an algorithm breaks a law that its kind is held to
├── Deadlock (RuntimeError)            the local driver found ranks waiting for each other
├── RankFailed (RuntimeError)          a peer died, hung or raised; names ranks and step
│   └── RanksLost                      the others go on without it: the step is to be repeated
└── TestbedUnavailable (RuntimeError)  this machine cannot make shaped hosts; says why
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class GradwireError(Exception):
    """Base of all errors raised by gradwire."""


class InvalidSetting(GradwireError, ValueError):
    """Something the user gave cannot be used."""


class NotInstalled(InvalidSetting):
    """A package that only a part of gradwire needs is not there.

    >>> print(NotInstalled("tuning", "optuna", "tune"))
    tuning needs optuna, which is not installed; run: pip install "gradwire[tune]"
    """

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(
            f'{what} needs {package}, which is not installed; run: pip install "gradwire[{extra}]"'
        )


class UnknownName(InvalidSetting, AttributeError):
    """A name that no file of the asked folder bears (an AttributeError too, so hasattr works)."""

    def __init__(self, kind: str, given: object, known: Iterable[str]) -> None:
        names, text = sorted(known), shown(given)
        close = get_close_matches(given, names, n=1) if isinstance(given, str) else []
        hint = f"did you mean {close[0]!r}?" if close else "choose one of these"
        super().__init__(f"no {kind} is called {text}; there are: {', '.join(names)}; {hint}")


class IncompatiblePair(InvalidSetting):
    """A compressor and a collective whose traits exclude each other."""


class RanksDiffer(InvalidSetting):
    """Ranks disagree on what all of them must share."""


class LawBroken(GradwireError, AssertionError):
    """An algorithm breaks a law; the message says what was found of it."""


class Deadlock(GradwireError, RuntimeError):
    """Ranks wait for each other and none can go on."""


class RankFailed(GradwireError, RuntimeError):
    """A rank of the group died, hung or raised.

    ``ranks`` are the failed ranks (empty when they could not be told apart), ``step`` the number
    of the step that could not be finished.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), step: int = -1) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.step = step


class RanksLost(RankFailed):
    """Ranks were lost and the others go on without them: the step is to be repeated.

    Raised by ``backward()`` under ``attach(on_failure="shrink")``, on all survivors in the same
    step. ``ranks`` are numbered as they were at attach. Gradients are None.
    """


class TestbedUnavailable(GradwireError, RuntimeError):
    """Shaped hosts cannot be made on this machine."""

    __test__ = False  # pytest must not collect it


_LONGEST = 400


def shown(given: object) -> str:
    """A value as messages show it: what has no text, or a longer one than anybody reads, is cut.

    >>> shown(4), shown([0.5]), len(shown("x" * 10_000))
    ('4', '[0.5]', 403)
    """
    try:
        text = repr(given)
    except Exception:  # whatever a user's object may raise; Python writes no whole number this long
        text = f"{type(given).__name__} (too long to show)"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def invalid(what: str, given: object, accepted: str, remedy: str) -> InvalidSetting:
    """Builds the standard message: what was given, what is accepted, what to do.

    >>> str(invalid("density", 4, "a number in (0, 1]", "for 4 % write density=0.04"))
    'density must be a number in (0, 1], got 4; for 4 % write density=0.04'
    """
    return InvalidSetting(f"{what} must be {accepted}, got {shown(given)}; {remedy}")
