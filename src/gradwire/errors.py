"""Every error that gradwire raises on purpose.

GradwireError
├── InvalidSetting (ValueError)    a user's mistake; the message ends in what to do
│   ├── NotInstalled               an optional package is needed, and is not there
│   ├── UnknownName                no file of that folder bears this name
│   ├── IncompatiblePair           a compressor and a collective that exclude each other
│   └── RanksDiffer                ranks attached different models or settings
├── Deadlock (RuntimeError)        ranks of one process wait for each other
└── RankFailed (RuntimeError)      a peer died, hung or raised; names ranks and step
    ├── LoopMistake                a loop did what an attached model cannot take
    └── RanksLost                  the others go on: the step is to be repeated
"""

import logging
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from enum import IntEnum
from functools import wraps
from inspect import signature
from typing import ParamSpec, Self, TypeVar

log = logging.getLogger("gradwire")
"""Where the library's warnings go, and what else it says beside errors."""


class ExitCode(IntEnum):
    """The codes that tell why a process ended.

    Those from 64 to 78 are of BSD's sysexits.
    """

    DONE = 0
    FAILED = 1
    """Any other error, or a check that found something wrong."""
    MISTAKE = 2
    """The user gave something that cannot be used."""
    NETWORK = 68
    """Hosts cannot reach each other."""
    UNAVAILABLE = 69
    """The job's store, or a testbed, is not there."""
    BROKEN = 70
    """A program is at fault: a rank raised, an algorithm breaks a law."""
    RANK_LOST = 75
    """A rank was killed, or does not answer; start again from a checkpoint."""
    BITS = 76
    """Ranks hold other means: memory or a link changes bits."""
    CONFIG = 78
    """Ranks were started with different models, settings or versions."""
    TIME_LIMIT = 124
    """A time limit has ended it, as `timeout` of coreutils tells."""


class GradwireError(Exception):
    """Base of all errors raised by gradwire.

    ``exit_code`` is the code that a process ends with which nobody keeps from ending by
    the error.
    """

    exit_code: ExitCode = ExitCode.FAILED


class InvalidSetting(GradwireError, ValueError):
    """Something the user gave cannot be used."""

    exit_code = ExitCode.MISTAKE


_FOLDERS = {"gradwire-lab": "./lab", "gradwire-bench": "./lab ./bench"}
"""The folders of gradwire's further packages, and of packages that they need.

No index has them.
"""


class NotInstalled(InvalidSetting, AttributeError):
    """A package that only a part of gradwire needs is not there.

    It is installed by the extra ``extra`` of ``base``, or by itself where there is no
    extra. It is an AttributeError too, so that ``hasattr(gw.compress, "sidco")`` works.

    >>> print(NotInstalled("tuning", "optuna", "tune"))
    tuning needs optuna, which is not installed; run: pip install "gradwire[tune]"
    >>> error = NotInstalled("compressor 'sidco'", "gradwire-lab")
    >>> print(str(error).partition("; ")[2])
    run: pip install ./lab (in a checkout of gradwire)
    """

    def __init__(
        self, what: str, package: str, extra: str | None = None, base: str = "gradwire"
    ) -> None:
        folders = f"{_FOLDERS.get(package, package)} (in a checkout of gradwire)"
        install = folders if extra is None else f'"{base}[{extra}]"'
        super().__init__(
            f"{what} needs {package}, which is not installed; run: pip install "
            f"{install}"
        )


def closest(text: str, names: Iterable[str]) -> str | None:
    """The name that a mistyped one stands for: a similar one, or one that begins alike.

    >>> closest("TopK", ["onebit", "topk"]), closest("bits", ["bitwidth", "block"])
    ('topk', 'bitwidth')
    >>> closest("rate", ["bitwidth", "block"])
    """
    known = {name.lower(): name for name in names}
    start = text[:_BEGINNING].lower()
    begun = [
        name for name in known if len(start) == _BEGINNING and name.startswith(start)
    ]
    close = [*get_close_matches(text.lower(), known, n=1), *begun]
    return known[close[0]] if close else None


_BEGINNING = 3
"""The letters that a name and a mistyped one share at least, if not similar."""


class UnknownName(InvalidSetting, AttributeError):
    """A name that no file of the asked folder bears.

    It is an AttributeError too, so hasattr works.
    """

    def __init__(self, kind: str, given: object, known: Iterable[str]) -> None:
        names = sorted(known)
        text = shown(given)
        close = closest(given, names) if isinstance(given, str) else None
        hint = f"did you mean {close!r}?" if close else "choose one of these"
        super().__init__(
            f"no {kind} is called {text}; there are: {', '.join(names)}; {hint}"
        )


class IncompatiblePair(InvalidSetting):
    """A compressor and a collective whose traits exclude each other."""


class RanksDiffer(InvalidSetting):
    """Ranks disagree on what all of them must share."""

    exit_code = ExitCode.CONFIG


class Deadlock(GradwireError, RuntimeError):
    """Ranks wait for each other and none can go on."""

    exit_code = ExitCode.BROKEN

    @classmethod
    def of(cls, waiting: Iterable[str], ended: list[int]) -> Self:
        """The error of ranks that are ``waiting``, in words, while some have ended."""
        lines = [*waiting]
        if ended:
            lines.append(f"already ended: rank {', '.join(map(str, ended))}")
        return cls(f"deadlock: {'; '.join(lines)}")


class RankFailed(GradwireError, RuntimeError):
    """A rank of the group died, hung or raised.

    Args:
        message: The text, with the cause and the remedy.
        ranks: The failed ranks by their numbers in the job, as ``dist.get_rank()``
            returns them. Empty (the default): they are unknown.
        step: The number of the interrupted step. -1 (the default): it is unknown.
        exit_code: The exit code of the cause, one of ``ExitCode``; default
            ``ExitCode.RANK_LOST``, which is 75.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: tuple[int, ...] = (),
        step: int = -1,
        exit_code: int = ExitCode.RANK_LOST,
    ) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.step = step
        self.exit_code = ExitCode(exit_code)


class LoopMistake(RankFailed):
    """The training loop and the attached model do not go together.

    The message has the remedy.

    For example, a parameter was added or unfrozen without a new ``attach``. Or a
    backward pass that raised was repeated where ``attach`` cannot repeat one. All ranks
    raise it. ``ranks`` has the ranks that found it. No rank is lost, and a restart
    without a change fails again.
    """


class RanksLost(RankFailed):
    """Ranks were lost and the others go on without them: the step is to be repeated.

    Raised by ``backward()`` under ``FailurePolicy(on_failure="shrink")``, on all
    survivors in the same step, and once for all models of a process. Gradients of the
    model are None.
    """


_P = ParamSpec("_P")
_T = TypeVar("_T")


def names_checked(
    function: Callable[_P, _T], others: Iterable[str] = ()
) -> Callable[_P, _T]:
    """Has a function refuse keywords that it does not know by ``UnknownName``.

    The ``others`` are left to the function, and named among those that there are.

    >>> @names_checked
    ... def clipped(*, max_norm): ...
    >>> try:
    ...     clipped(maxnorm=1.0)
    ... except UnknownName as error:
    ...     for part in str(error).split("; "):
    ...         print(part)
    no argument of clipped is called 'maxnorm'
    there are: max_norm
    did you mean 'max_norm'?
    """
    known = [*signature(function).parameters, *others]

    @wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        for name in kwargs:
            if name not in known:
                raise UnknownName(f"argument of {function.__name__}", name, known)
        return function(*args, **kwargs)

    return checked


_LONGEST = 400


def shown(value: object) -> str:
    """A value as messages show it: what has no text, or a longer one than anybody
    reads, is cut.

    >>> shown(4), shown([0.5]), len(shown("x" * 10_000))
    ('4', '[0.5]', 403)
    """
    try:
        text = repr(value)
    except (
        Exception
    ):  # whatever a user's object may raise; Python writes no whole number this long
        text = f"{type(value).__name__} (too long to show)"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def invalid(what: str, given: object, accepted: str, remedy: str) -> InvalidSetting:
    """Builds the standard message: what was given, what is accepted, what to do.

    >>> str(invalid("density", 4, "a number in (0, 1]", "for 4 % write density=0.04"))
    'density must be a number in (0, 1], got 4; for 4 % write density=0.04'
    """
    return InvalidSetting(f"{what} must be {accepted}, got {shown(given)}; {remedy}")


def with_brackets(value: object, remedy: str) -> str:
    """The remedy where a class or a function is given, and not what it makes.

    >>> with_brackets(dict, "write {}"), with_brackets({}, "write {}")
    ('write dict(), with its brackets', 'write {}')
    """
    name = getattr(value, "__name__", "")
    return f"write {name}(), with its brackets" if name and callable(value) else remedy
