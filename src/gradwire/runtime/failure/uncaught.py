"""Uncaught: a script that one of gradwire's errors ends leaves with the exit code of its cause.

Python ends with 1 whatever the error is. A launcher that has the cause in the code can start the
job again, on other machines, or not at all (`errors.ExitCode`).
"""

from __future__ import annotations

import sys
from types import TracebackType

from ...errors import GradwireError


def leave_by_cause() -> None:
    """Has this process end so from now on; a hook that is there already is called first."""
    if getattr(sys.excepthook, "__module__", None) == __name__:
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, GradwireError):
            raise SystemExit(int(error.exit_code))  # from a hook, this is how the process ends

    sys.excepthook = hook
